"""Sums and means of the workers' values, computed by each worker in the same order: all get the same result."""

from __future__ import annotations

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
