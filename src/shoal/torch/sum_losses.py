"""Losses that are sums over the samples, although the job takes them for means: found at the first backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

SUM = 2
"""`reduction="sum"` in the nodes of autograd."""


def is_sum(node: Any, wholes: frozenset[int] = frozenset()) -> bool:
    """Whether the loss that this node made is a sum.

    A sum that is divided, or multiplied by less than 1, may be a mean: not if it is divided by what all workers have
    together, one of `wholes`. A `GradScaler` multiplies by more.
    """
    if node is None:
        return False
    reduction = getattr(node, "_saved_reduction", None)
    if reduction is not None:
        return bool(reduction == SUM)
    if node.name() == "SumBackward0":
        return True
    if node.name() in ("MulBackward0", "DivBackward0"):
        scaled = _before_scaling(node, wholes)
        return scaled is not None and is_sum(scaled, wholes)
    if node.name() not in ("AddBackward0", "SubBackward0", "NegBackward0", "ToCopyBackward0"):
        return False
    terms = [term for term, _ in node.next_functions if term is not None]
    # A sum of squared weights may be added to a mean.
    reduced = [term for term in terms if getattr(term, "_saved_reduction", None) == SUM]
    return bool(reduced) or (bool(terms) and all(is_sum(term, wholes) for term in terms))


def _before_scaling(node: Any, wholes: frozenset[int]) -> Any:
    """What this node has multiplied by a constant of at least 1, or divided by one of `wholes`. None: neither."""
    (left, _), (right, _) = node.next_functions
    if (left is None) == (right is None):
        return None
    constant = node._saved_self if left is None else node._saved_other
    if constant is None or constant.numel() != 1:
        return None
    factor, divides = float(constant), node.name() == "DivBackward0"
    if divides and (left is None or factor == 0):
        return None
    divisor = factor if divides else 1 / factor if factor else 0.0
    is_whole = any(abs(divisor - whole) < 1e-3 for whole in wholes)
    return (left or right) if is_whole or (factor >= 1.0 and not divides) else None


@contextmanager
def refusing_sums(refuses: bool, wholes: Callable[[], frozenset[int]] = frozenset) -> Iterator[None]:
    """Within it, the first call of `loss.backward()` refuses a sum, also one divided by one of `wholes()`."""
    if not refuses:
        yield
        return
    original = Tensor.backward

    def backward(loss: Tensor, *args: Any, **kwargs: Any) -> None:
        torch.Tensor.backward = original
        if is_sum(loss.grad_fn, wholes()):
            raise RuntimeError(
                "the loss is a sum over the samples, or a sum divided by the batch size of all workers, and the job "
                "takes the mean over its workers: use a mean (reduction='mean', or divide by len(x)), or "
                "job.loader(..., loss='sum') for the gradient of the sum. If it is a mean that ends in a sum, say so: "
                "job.loader(..., loss='mean')"
            )
        original(loss, *args, **kwargs)

    torch.Tensor.backward = backward
    try:
        yield
    finally:
        torch.Tensor.backward = original
