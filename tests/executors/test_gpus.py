"""Real GPUs, found with NVML: tested with a module that answers as pynvml does."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from shoal.executors.base import GpuUsage, WorkerSpec
from shoal.executors.gpus import UsageMeter, find_gpus, type_word
from shoal.executors.local import LocalExecutor

CARDS = [
    ("NVIDIA A100-SXM4-80GB", "GPU-aaa", 80 << 30),
    ("NVIDIA A100-SXM4-80GB", "GPU-bbb", 80 << 30),
    ("Tesla V100-PCIE-16GB", "GPU-ccc", 16 << 30),
]


def driver(cards: list[tuple[str, str, int]], init: Exception | None = None) -> ModuleType:
    """A module with the functions of pynvml that are used. A handle is the card's index."""
    nvml = ModuleType("pynvml")
    nvml.NVMLError, nvml.NVMLError_LibraryNotFound = NVMLError, NVMLError_LibraryNotFound

    def initialise() -> None:
        if init is not None:
            raise init

    def by_uuid(uuid: str) -> int:
        found = [i for i, card in enumerate(cards) if card[1] == uuid]
        if not found:
            raise NVMLError("Not Found")
        return found[0]

    def rates(handle: int) -> Any:
        if handle == 2:
            raise NVMLError("Not Supported")
        return SimpleNamespace(gpu=10 * (handle + 1))

    nvml.nvmlInit, nvml.nvmlShutdown = initialise, lambda: None
    nvml.nvmlDeviceGetCount = lambda: len(cards)
    nvml.nvmlDeviceGetHandleByIndex = lambda index: index
    nvml.nvmlDeviceGetHandleByUUID = by_uuid
    nvml.nvmlDeviceGetName = lambda handle: cards[handle][0]
    nvml.nvmlDeviceGetUUID = lambda handle: cards[handle][1]
    nvml.nvmlDeviceGetUtilizationRates = rates
    nvml.nvmlDeviceGetMemoryInfo = lambda handle: SimpleNamespace(total=cards[handle][2], used=2**30)
    return nvml


class NVMLError(Exception):
    pass


class NVMLError_LibraryNotFound(NVMLError):
    pass


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Install a module as pynvml; None: there is none."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return lambda module: monkeypatch.setitem(sys.modules, "pynvml", module)


def test_the_functions_that_are_used_are_those_of_pynvml() -> None:
    real = importlib.import_module("pynvml")
    for name in vars(driver(CARDS)):
        assert name.startswith("__") or hasattr(real, name)


def test_the_gpus_of_the_machine_become_nodes_of_one_type_each(machine: Any) -> None:
    machine(driver(CARDS))
    nodes = LocalExecutor().nodes()
    assert [(n.name, n.gpus, n.gpu_type, n.virtual) for n in nodes] == [
        ("local-a100", 2, "a100", False),
        ("local-v100", 1, "v100", False),
    ]
    assert nodes[0].devices == ("GPU-aaa", "GPU-bbb")


def test_a_worker_sees_the_one_gpu_it_was_given(machine: Any, tmp_path: Any) -> None:
    machine(driver(CARDS))
    executor = LocalExecutor()
    spec = WorkerSpec("1.0", tmp_path, "local-a100", 1, ("true",), "/", {"LR": "1"})
    env = executor._env(spec)
    assert (env["CUDA_VISIBLE_DEVICES"], env["SHOAL_DEVICE"], env["LR"]) == ("GPU-bbb", "cuda:0", "1")
    virtual = LocalExecutor(2)
    env = virtual._env(WorkerSpec("1.0", tmp_path, "local", 1, ("true",), "/", {}))
    assert (env["CUDA_VISIBLE_DEVICES"], env["SHOAL_DEVICE"]) == ("", "cpu")


def test_what_gpus_do_is_asked_of_the_driver_and_left_out_where_it_does_not_say(machine: Any) -> None:
    machine(driver(CARDS))
    executor = LocalExecutor()
    assert [n.gpu_memory_mb for n in executor.nodes()] == [81_920.0, 16_384.0]
    assert executor.usage() == {
        ("local-a100", 0): GpuUsage(10.0, 1024.0),
        ("local-a100", 1): GpuUsage(20.0, 1024.0),
    }
    machine(driver([], NVMLError("Driver Not Loaded")))
    assert UsageMeter().read("GPU-aaa") is None
    assert LocalExecutor(2).usage() == {}, "virtual ones do nothing that could be seen"


GRANTED = {
    "not set": (None, ["GPU-aaa", "GPU-bbb", "GPU-ccc"]),
    "indices": ("2,0", ["GPU-ccc", "GPU-aaa"]),
    "ids": ("GPU-bbb", ["GPU-bbb"]),
    "the beginning of an id": ("GPU-b", ["GPU-bbb"]),
    "an id that two could have": ("GPU-", []),
    "none": ("", []),
    "as CUDA does, up to what is not there": ("1,7,0", ["GPU-bbb"]),
    "as CUDA does, up to what is named twice": ("1,1", ["GPU-bbb"]),
}


@pytest.mark.parametrize("case", GRANTED)
def test_only_gpus_that_an_engine_granted_are_used(
    machine: Any, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    visible, expected = GRANTED[case]
    machine(driver(CARDS))
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    gpus, why = find_gpus()
    assert [gpu.uuid for gpu in gpus] == expected
    assert bool(why) == (not expected)


@pytest.mark.parametrize(
    ("found", "why"),
    [
        (None, "nvidia-ml-py is not installed"),
        (driver([], NVMLError_LibraryNotFound("Library Not Found")), "libnvidia-ml.so.1 is not installed"),
        (driver([], NVMLError("Driver Not Loaded")), "does not answer: Driver Not Loaded"),
        (driver([]), "finds no GPU"),
    ],
    ids=["no package", "no driver", "a driver that fails", "no card"],
)
def test_without_gpus_there_are_virtual_ones_and_it_is_said_why(machine: Any, found: Any, why: str) -> None:
    machine(found)
    assert why in find_gpus()[1]
    executor = LocalExecutor()
    assert executor.nodes()[0].virtual
    assert why in executor.why_virtual


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("Tesla V100-PCIE-16GB", "v100"),
        ("NVIDIA GeForce RTX 4090", "4090"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("Quadro", "quadro"),
    ],
)
def test_a_type_is_the_word_that_people_use(name: str, word: str) -> None:
    assert type_word(name) == word
