"""The NVIDIA GPUs of this machine, read with NVML (nvidia-ml-py)."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
from dataclasses import dataclass
from types import ModuleType

from shoal.executors.base import GpuUsage


@dataclass(frozen=True, slots=True)
class Gpu:
    index: int
    name: str
    uuid: str
    memory_bytes: int


class NvmlError(Exception):
    """NVML is not installed or does not answer."""


def open_nvml() -> ModuleType:
    """Load and initialise NVML. Raise NvmlError with the reason if that is not possible."""
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        raise NvmlError("the package nvidia-ml-py is not installed") from None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError_LibraryNotFound:
        raise NvmlError("the NVIDIA driver's library libnvidia-ml.so.1 is not installed") from None
    except nvml.NVMLError as error:
        raise NvmlError(f"the NVIDIA driver does not answer: {error}") from None
    return nvml


class UsageMeter:
    """Reads the usage of GPUs by their UUID. It initialises NVML once, because that takes longer than a reading."""

    def __init__(self) -> None:
        self._nvml: ModuleType | None = None

    def read(self, uuid: str) -> GpuUsage | None:
        """Return None if the driver does not tell."""
        try:
            self._nvml = nvml = self._nvml or open_nvml()
        except NvmlError:
            return None
        try:
            handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
            rates = nvml.nvmlDeviceGetUtilizationRates(handle)
            memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        except nvml.NVMLError:
            return None
        return GpuUsage(float(rates.gpu), memory.used / 2**20)


def find_gpus() -> tuple[tuple[Gpu, ...], str]:
    """Return the GPUs that this process may use, and the reason if there are none."""
    try:
        nvml = open_nvml()
    except NvmlError as error:
        return (), str(error)
    gpus = []
    try:
        for index in range(nvml.nvmlDeviceGetCount()):
            with contextlib.suppress(nvml.NVMLError):  # one broken GPU does not hide the others
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                name, uuid = nvml.nvmlDeviceGetName(handle), nvml.nvmlDeviceGetUUID(handle)
                gpus.append(Gpu(index, str(name), str(uuid), _memory_bytes(nvml, handle)))
    except nvml.NVMLError as error:
        return (), f"the NVIDIA driver does not count its GPUs: {error}"
    finally:
        nvml.nvmlShutdown()
    if not gpus:
        return (), "the NVIDIA driver finds no GPU"
    granted = granted_gpus(tuple(gpus), os.environ.get("CUDA_VISIBLE_DEVICES"))
    return granted, "" if granted else "CUDA_VISIBLE_DEVICES grants this process no GPU"


def granted_gpus(gpus: tuple[Gpu, ...], visible: str | None) -> tuple[Gpu, ...]:
    """The GPUs that CUDA_VISIBLE_DEVICES names, in its order: what an engine has granted of its machine.

    It has indices among the GPUs that the process may open, or ids of GPUs. Like CUDA, stop at what is not there.
    """
    if visible is None:
        return gpus
    found: list[Gpu] = []
    for word in (part.strip() for part in visible.split(",")):
        if word.isdigit():
            named = [gpus[int(word)]] if int(word) < len(gpus) else []
        else:
            named = [gpu for gpu in gpus if word and gpu.uuid.startswith(word)]
        if len(named) != 1 or named[0] in found:
            break
        found += named
    return tuple(found)


def _memory_bytes(nvml: ModuleType, handle: object) -> int:
    try:
        return int(nvml.nvmlDeviceGetMemoryInfo(handle).total)
    except nvml.NVMLError:
        return 0  # GPUs that share the machine's memory do not report it


def type_word(name: str) -> str:
    """The word that users write for a GPU type: `a100` for `NVIDIA A100-SXM4-80GB`."""
    words = re.findall(r"[a-z]*\d+[a-z]*", name.lower())
    return words[0] if words else re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "gpu"
