"""Which NVIDIA GPUs this machine has, asked of NVML if its library is there; nothing is imported for it."""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass

from shoal.executors.base import GpuUsage


@dataclass(frozen=True, slots=True)
class Gpu:
    index: int
    name: str
    uuid: str
    memory_bytes: int


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class _Rates(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class Meter:
    """Asks the driver what GPUs do, by their UUID. Its library is opened once: that takes longer than asking."""

    def __init__(self) -> None:
        self._nvml: ctypes.CDLL | None = None

    def read(self, uuid: str) -> GpuUsage | None:
        """None where the driver does not say."""
        if self._nvml is None:
            self._nvml = _opened()
        handle, rates, memory = ctypes.c_void_p(), _Rates(), _Memory()
        nvml = self._nvml
        if nvml is None or nvml.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(handle)) != 0:
            return None
        if nvml.nvmlDeviceGetUtilizationRates(handle, ctypes.byref(rates)) != 0:
            return None
        if nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) != 0:
            return None
        return GpuUsage(float(rates.gpu), memory.used / 2**20)


def _opened() -> ctypes.CDLL | None:
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    return nvml if nvml.nvmlInit_v2() == 0 else None


def find_gpus() -> tuple[tuple[Gpu, ...], str]:
    """(the GPUs, why there are none)."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return (), "the NVIDIA driver's library libnvidia-ml.so.1 is not installed"
    if nvml.nvmlInit_v2() != 0:
        return (), "the NVIDIA driver does not answer"
    try:
        count = ctypes.c_uint()
        if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
            return (), "the NVIDIA driver does not say how many GPUs there are"
        gpus = tuple(g for i in range(count.value) if (g := _gpu(nvml, i)) is not None)
        return gpus, "" if gpus else "the NVIDIA driver knows of no GPU"
    finally:
        nvml.nvmlShutdown()


def _gpu(nvml: ctypes.CDLL, index: int) -> Gpu | None:
    handle, text, memory = ctypes.c_void_p(), ctypes.create_string_buffer(96), _Memory()
    if nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)) != 0:
        return None
    name = uuid = ""
    if nvml.nvmlDeviceGetName(handle, text, len(text)) == 0:
        name = text.value.decode(errors="replace")
    if nvml.nvmlDeviceGetUUID(handle, text, len(text)) == 0:
        uuid = text.value.decode(errors="replace")
    nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory))
    return Gpu(index, name, uuid, int(memory.total))


def type_word(name: str) -> str:
    """`NVIDIA A100-SXM4-80GB` as the word users write: `a100`."""
    words = re.findall(r"[a-z]*\d+[a-z]*", name.lower())
    return words[0] if words else re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "gpu"
