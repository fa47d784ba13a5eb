"""Compiled models: a worker's part of the batch changes its size at a resize, which must not compile again."""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor, nn


def mark_batch_dynamic(batch: Any) -> None:
    """Tell torch.compile, if the script uses it, that the first dimension of these tensors varies."""
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None:
        _mark(batch, dynamo.maybe_mark_dynamic)


def _mark(value: Any, mark: Any) -> None:
    if isinstance(value, Tensor):
        if value.dim() and value.shape[0] > 1:
            mark(value, 0)
    elif isinstance(value, dict):
        for item in value.values():
            _mark(item, mark)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _mark(item, mark)


def mark_inputs_dynamic(model: nn.Module) -> None:
    """The same for the inputs of a compiled model: tensors that were moved to a GPU have lost the mark."""
    if type(model).__name__ == "OptimizedModule":
        model.register_forward_pre_hook(
            lambda _, args, kwargs: mark_batch_dynamic((args, kwargs)), with_kwargs=True
        )
