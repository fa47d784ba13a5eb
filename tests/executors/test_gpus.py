"""Real GPUs, found with NVML: tested with a library that answers as the driver's does."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.executors import gpus as gpus_module
from shoal.executors.base import GpuUsage, WorkerSpec
from shoal.executors.gpus import Meter, find_gpus, type_word
from shoal.executors.local import LocalExecutor

CARDS = [
    ("NVIDIA A100-SXM4-80GB", "GPU-aaa", 80 << 30),
    ("NVIDIA A100-SXM4-80GB", "GPU-bbb", 80 << 30),
    ("Tesla V100-PCIE-16GB", "GPU-ccc", 16 << 30),
]


def driver(cards: list[tuple[str, str, int]], init: int = 0) -> Any:
    """The functions of libnvidia-ml that are used; a handle is the card's index plus one."""

    def count(out: Any) -> int:
        out._obj.value = len(cards)
        return 0

    def handle(index: int, out: Any) -> int:
        out._obj.value = index + 1
        return 0

    def text(column: int) -> Any:
        def get(handle: Any, buffer: Any, size: int) -> int:
            buffer.value = cards[handle.value - 1][column].encode()
            return 0

        return get

    def memory(handle: Any, out: Any) -> int:
        out._obj.total = cards[handle.value - 1][2]
        out._obj.used = 2**30
        return 0

    def by_uuid(uuid: bytes, out: Any) -> int:
        found = [i for i, card in enumerate(cards) if card[1].encode() == uuid]
        out._obj.value = found[0] + 1 if found else 0
        return 0 if found else 6

    def rates(handle: Any, out: Any) -> int:
        out._obj.gpu = 10 * handle.value
        return 0 if handle.value < 3 else 3  # the last one does not tell

    return SimpleNamespace(
        nvmlDeviceGetHandleByUUID=by_uuid,
        nvmlDeviceGetUtilizationRates=rates,
        nvmlInit_v2=lambda: init,
        nvmlShutdown=lambda: 0,
        nvmlDeviceGetCount_v2=count,
        nvmlDeviceGetHandleByIndex_v2=handle,
        nvmlDeviceGetName=text(0),
        nvmlDeviceGetUUID=text(1),
        nvmlDeviceGetMemoryInfo=memory,
    )


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    def install(found: Any) -> None:
        def load(name: str) -> Any:
            if isinstance(found, Exception):
                raise found
            return found

        monkeypatch.setattr(gpus_module, "ctypes", _Ctypes(load))

    return install


class _Ctypes:
    """The module `ctypes` but for how a library is loaded."""

    def __init__(self, load: Any) -> None:
        self.CDLL = load

    def __getattr__(self, name: str) -> Any:
        return getattr(ctypes, name)


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
    machine(OSError("the driver is gone"))
    assert Meter().read("GPU-aaa") is None
    assert LocalExecutor(2).usage() == {}, "virtual ones do nothing that could be seen"


@pytest.mark.parametrize(
    ("found", "why"),
    [
        (OSError("no such file"), "not installed"),
        (driver([], init=9), "does not answer"),
        (driver([]), "knows of no GPU"),
    ],
    ids=["no driver", "a driver that fails", "no card"],
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
