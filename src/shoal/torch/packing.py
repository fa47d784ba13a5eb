"""How tensors travel: which are pickled, which are streamed, where they are written, and their bytes."""

from __future__ import annotations

import ctypes
import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

SMALL_BYTES = 4096
"""Tensors up to this size are pickled into the description; larger ones are streamed from their memory."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A range of a parameter's elements, with the optimizer state of these elements."""

    index: int
    low: int
    high: int


@dataclass(frozen=True, slots=True)
class Streamed:
    """In a description: stands for a tensor that is streamed."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    index: int


class Later:
    """In a description: stands for a large tensor that only a whole description contains."""


def size_bytes(tensor: Tensor) -> int:
    return int(tensor.numel() * tensor.element_size())


def alike(value: Any, param: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == param.shape and value.dim() > 0


def flattened(tensor: Tensor) -> Tensor:
    """The elements in order; a view if the tensor is contiguous."""
    return tensor.detach().reshape(-1)


def window(tensor: Tensor, piece: Piece) -> Tensor | None:
    return flattened(tensor)[piece.low : piece.high] if tensor.is_contiguous() else None


def put(tensor: Tensor, piece: Piece, value: Tensor) -> None:
    if tensor.is_contiguous():
        there = flattened(tensor)[piece.low : piece.high]
        if there.data_ptr() != value.data_ptr():
            there.copy_(value)
    else:
        flat = flattened(tensor).clone()
        flat[piece.low : piece.high] = value
        tensor.copy_(flat.view(tensor.shape))


def place(value: Any, large: list[Tensor]) -> Any:
    """Replace large tensors by `Streamed` and collect them in `large`; copy everything else."""
    if isinstance(value, Tensor) and size_bytes(value) > SMALL_BYTES:
        large.append(value.detach())
        return Streamed(tuple(value.shape), value.dtype, len(large) - 1)
    if isinstance(value, dict):
        return {k: place(v, large) for k, v in value.items()}
    return copied(value)


def settle(value: Any, mine: Any, homes: dict[int, Tensor]) -> Any:
    """Replace each `Streamed` by the tensor it is written into: that in `mine` if it fits. Collect them in `homes`."""
    if isinstance(value, Streamed):
        fits = (
            isinstance(mine, Tensor)
            and tuple(mine.shape) == value.shape
            and mine.dtype == value.dtype
            and mine.device.type == "cpu"
            and mine.is_contiguous()
        )
        homes[value.index] = mine.detach() if fits else torch.empty(value.shape, dtype=value.dtype)
        return homes[value.index]
    if isinstance(value, dict):
        known = mine if isinstance(mine, dict) else {}
        return {k: settle(v, known.get(k), homes) for k, v in value.items()}
    return value


def cloned(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().clone()


def compact(tensor: Tensor) -> Tensor:
    """For pickling at once: copied only if its storage is larger than the tensor."""
    host = tensor.detach().cpu()
    return host if host.untyped_storage().nbytes() == size_bytes(host) else host.clone()


def copied(value: Any, whole: bool = True, copy: Callable[[Tensor], Tensor] = cloned) -> Any:
    if isinstance(value, Tensor):
        return copy(value) if whole or size_bytes(value) <= SMALL_BYTES else Later()
    if isinstance(value, dict):
        return {k: copied(v, whole, copy) for k, v in value.items()}
    if isinstance(value, list):
        return [copied(v, whole, copy) for v in value]
    if type(value) is tuple:
        return tuple(copied(v, whole, copy) for v in value)
    return value


def unfit(box: dict[str, Any]) -> RuntimeError | None:
    """An error that names the entry of `job.state` that cannot be pickled."""
    for key, value in box.items():
        try:
            dumps(value)
        except Exception as error:
            if holds_shards(value):
                return RuntimeError(
                    f"job.state[{key!r}] holds rows of a sharded tensor (DTensor), whose owner changes with the "
                    "workers: keep whole tensors in it, made on every worker, such as param.detach().full_tensor()"
                )
            return RuntimeError(f"job.state[{key!r}] cannot travel, because it cannot be pickled: {error}")
    return None


def holds_shards(value: Any) -> bool:
    """Whether it contains a `DTensor`. Importing its class takes long."""
    if isinstance(value, dict):
        return any(holds_shards(v) for v in value.values())
    if isinstance(value, (list, tuple)):
        return any(holds_shards(v) for v in value)
    return any(kind.__name__ == "DTensor" for kind in type(value).__mro__)


def filled(value: Any, mine: Any) -> Any:
    """`value` with each `Later` replaced by its counterpart in `mine`."""
    if isinstance(value, Later):
        return value if mine is None else mine
    if isinstance(value, dict):
        known = mine if isinstance(mine, dict) else {}
        return {k: filled(v, known.get(k)) for k, v in value.items()}
    if isinstance(value, list) or type(value) is tuple:
        fits = isinstance(mine, (list, tuple)) and len(mine) == len(value)
        return type(value)(filled(v, m) for v, m in zip(value, mine if fits else [None] * len(value)))
    return value


def lacks(value: Any) -> bool:
    """Whether it contains a `Later`."""
    if isinstance(value, dict):
        return any(lacks(v) for v in value.values())
    if isinstance(value, (list, tuple)):
        return any(lacks(v) for v in value)
    return isinstance(value, Later)


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if type(value) is not Tensor or not _plain(value):
            return NotImplemented
        return rebuilt, (bytes(as_bytes(value)), value.dtype, tuple(value.shape))


def _plain(tensor: Tensor) -> bool:
    """Whether elements, dtype and shape describe it completely."""
    usual = tensor.device.type == "cpu" and tensor.layout is torch.strided and tensor.is_contiguous()
    special = tensor.requires_grad or tensor.is_quantized or tensor.is_conj() or tensor.is_neg()
    return usual and not special and not tensor.is_nested and not tensor.__dict__


def rebuilt(data: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Checkpoints refer to this function by name."""
    tensor = torch.empty(shape, dtype=dtype)
    if data:
        as_bytes(tensor)[:] = data
    return tensor


def dumps(value: Any) -> bytes:
    """`pickle.dumps` with tensors as their bytes. torch would make an archive of each, which is slow."""
    file = io.BytesIO()
    _Pickler(file, pickle.HIGHEST_PROTOCOL).dump(value)
    return file.getvalue()


def as_bytes(tensor: Tensor) -> memoryview:
    """The tensor's bytes; without a copy if it is contiguous in host memory."""
    flat = tensor.detach().cpu().contiguous().view(-1)
    if not flat.numel():
        return memoryview(b"")
    buffer = (ctypes.c_ubyte * flat.nbytes).from_address(flat.data_ptr())  # Tensor.numpy() needs NumPy
    buffer.tensor = flat  # the memory lives as long as the view
    return memoryview(buffer).cast("B")
