"""Sums and means of the workers' values, computed by each worker in the same order: all get the same result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def sum_of(values: list[Any], like: Any) -> Any:
    """Like a number or tensor of this worker."""
    if isinstance(like, Tensor):
        whole = not like.dtype.is_floating_point and not like.dtype.is_complex
        wide = torch.int64 if whole else torch.promote_types(like.dtype, torch.float64)
        total = torch.stack([_same_shape(v, like).to(wide) for v in values]).sum(0)
        return total.to(device=like.device, dtype=wide if whole else like.dtype)
    return sum(values[1:], values[0])


def mean_of(values: list[tuple[float, Any]], like: Any) -> Any:
    """The weighted mean. A value without weight does not count, even if it is not a number."""
    counting = [(weight, value) for weight, value in values if weight] or [
        (1.0, value) for _, value in values
    ]
    total = sum(weight for weight, _ in counting)
    if isinstance(like, Tensor):
        parts = [_same_shape(v, like).double() * (weight / total) for weight, v in counting]
        kept = like.dtype if like.dtype.is_floating_point else torch.get_default_dtype()
        return torch.stack(parts).sum(0).to(device=like.device, dtype=kept)
    return sum(weight * value for weight, value in counting) / total


def _same_shape(value: Any, like: Tensor) -> Tensor:
    found = torch.as_tensor(value).detach().cpu()
    if found.shape != like.shape:
        raise ValueError(
            f"one worker has a tensor of {tuple(like.shape)}, another one of {tuple(found.shape)}: reduce each to one "
            "shape first, or use job.gather"
        )
    return found


class WeightedSum:
    """A weighted sum of values: numbers, tensors, or dictionaries and sequences of them."""

    def __init__(self) -> None:
        self.weight = 0.0
        self._sum: Any = None

    def add(self, value: Any, weight: float) -> None:
        if weight:
            self._add(_mapped(lambda v: _double(v) * weight, value), weight)

    def add_sum(self, other: WeightedSum) -> None:
        if other.weight:
            self._add(other._sum, other.weight)

    def _add(self, weighted: Any, weight: float) -> None:
        self._sum = weighted if self._sum is None else _mapped(lambda a, b: a + b, self._sum, weighted)
        self.weight += weight

    def mean(self) -> Any:
        """Floats for numbers and tensors of one element, tensors for others."""
        return _mapped(lambda v: _plain(v / self.weight), self._sum)


def _mapped(f: Callable[..., Any], first: Any, *others: Any) -> Any:
    if isinstance(first, dict):
        return {key: _mapped(f, value, *(o[key] for o in others)) for key, value in first.items()}
    if isinstance(first, (list, tuple)):
        return type(first)([_mapped(f, *values) for values in zip(first, *others, strict=True)])
    return f(first, *others)


def _double(value: Any) -> Any:
    return value.detach().cpu().double() if isinstance(value, Tensor) else float(value)


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 else value.to(torch.get_default_dtype())
    return value
