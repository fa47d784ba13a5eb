"""Losses that are sums over the samples, although the job takes them for means: found at the first backward pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

SUM = 2
"""`reduction="sum"` in the nodes of autograd."""


def is_sum(node: Any) -> bool:
    """Whether the loss that this node made is a sum.

    A sum that is divided, or multiplied by less than 1, may be a mean. A `GradScaler` multiplies by more.
    """
    if node is None:
        return False
    reduction = getattr(node, "_saved_reduction", None)
    if reduction is not None:
        return bool(reduction == SUM)
    if node.name() == "SumBackward0":
        return True
    if node.name() == "MulBackward0":
        scaled = _before_scaling(node)
        return scaled is not None and is_sum(scaled)
    if node.name() not in ("AddBackward0", "SubBackward0", "NegBackward0", "ToCopyBackward0"):
        return False
    terms = [term for term, _ in node.next_functions if term is not None]
    # A sum of squared weights may be added to a mean.
    reduced = [term for term in terms if getattr(term, "_saved_reduction", None) == SUM]
    return bool(reduced) or (bool(terms) and all(is_sum(term) for term in terms))


def _before_scaling(node: Any) -> Any:
    """What this node has multiplied by a constant of at least 1. None: it has multiplied something else."""
    (left, _), (right, _) = node.next_functions
    if (left is None) == (right is None):
        return None
    factor = node._saved_self if left is None else node._saved_other
    return (left or right) if factor.numel() == 1 and float(factor) >= 1.0 else None


@contextmanager
def refusing_sums(refuses: bool) -> Iterator[None]:
    """Within it, the first call of `loss.backward()` refuses a sum."""
    if not refuses:
        yield
        return
    original = Tensor.backward

    def backward(loss: Tensor, *args: Any, **kwargs: Any) -> None:
        torch.Tensor.backward = original
        if is_sum(loss.grad_fn):
            raise RuntimeError(
                "the loss is a sum over the samples, and the job takes the mean over its workers: use a mean "
                "(reduction='mean'), or job.loader(..., loss='sum') for the gradient of the sum. If it is a mean that "
                "ends in a sum, say so: job.loader(..., loss='mean')"
            )
        original(loss, *args, **kwargs)

    torch.Tensor.backward = backward
    try:
        yield
    finally:
        torch.Tensor.backward = original
