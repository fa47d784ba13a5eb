"""Whether the replicas still have the same parameters and optimizer state: a few elements of each are compared.

All workers apply the same gradients to the same values, so they stay equal to the bit. What a script does on some
workers only (loading weights, clipping) sets whole tensors apart, so a few elements show it.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from shoal.torch.packing import as_bytes, flattened
from shoal.torch.state import ModelState
from torch import Tensor

ELEMENTS = 64
"""At least so many of each tensor are compared, if it has them."""


@dataclass(frozen=True, slots=True)
class Weights:
    """One worker's: what computes them, and a digest of each tensor by its name."""

    hardware: str
    digests: dict[str, bytes]


def digest(state: ModelState) -> bytes:
    """Of all tensors. On a GPU their elements are collected there, and copied at once."""
    sha = hashlib.sha256()
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for _, tensor in _tensors(state):
        kinds.setdefault((tensor.device, tensor.dtype), []).append(_some(tensor))
    for samples in kinds.values():
        sha.update(as_bytes(torch.cat(samples)))
    return sha.digest()


def weights_of(state: ModelState) -> Weights:
    digests = {name: hashlib.sha256(as_bytes(_some(t))).digest() for name, t in _tensors(state)}
    return Weights(_hardware(state), digests)


def first_difference(members: Sequence[str], weights: Sequence[Weights]) -> str | None:
    """Which tensor differs first, between workers with the same hardware: others may round in their own way."""
    for name in dict.fromkeys(name for one in weights for name in one.digests):
        models: dict[str, str] = {}  # hardware -> the first worker that has it
        for who, one in zip(members, weights):
            model = models.setdefault(one.hardware, who)
            if one.digests.get(name) != weights[members.index(model)].digests.get(name):
                return f"{name} differs between the workers {model} and {who}"
    return None


def _tensors(state: ModelState) -> Iterator[tuple[str, Tensor]]:
    for name, param in zip(state.names(), state.parameters):
        yield name, param
        for key, value in sorted(state.slots(param).items()):
            if isinstance(value, Tensor):
                yield f"{key!r} of {name}", value


def _some(tensor: Tensor) -> Tensor:
    """Evenly spaced elements."""
    flat = flattened(tensor)
    return flat[:: max(1, flat.numel() // ELEMENTS)]


def _hardware(state: ModelState) -> str:
    devices = {p.device for p in state.parameters}
    gpus = sorted({torch.cuda.get_device_name(d) for d in devices if d.type == "cuda"})
    cpu = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"
    return f"torch {torch.__version__} on {', '.join(gpus) or cpu}"
