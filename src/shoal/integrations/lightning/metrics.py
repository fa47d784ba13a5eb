"""Reductions over the workers, as Lightning and torchmetrics ask for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from shoal.torch.job import Job
from torch import Tensor

_OF_ALL: dict[str, Callable[[Tensor], Tensor]] = {
    "max": lambda values: values.max(dim=0).values,
    "min": lambda values: values.min(dim=0).values,
    "product": lambda values: values.prod(dim=0),
}


def reduced(job: Job, value: Any, how: Any, in_step: bool) -> Any:
    """`how`: a name, or a `torch.distributed.ReduceOp`.

    The mean of what a training step logs counts each worker by its part of the batch. Elsewhere every worker counts the
    same: for the mean of an epoch Lightning reduces a sum and a count, and divides them.
    """
    name = str(how).rpartition(".")[2].lower() if how is not None else "mean"
    tensor = value if isinstance(value, Tensor) else torch.tensor(value)
    if name in ("mean", "avg"):
        # Not in the dtype of a count: the mean of whole numbers is none.
        floating = tensor if tensor.is_floating_point() else tensor.double()
        return job.mean(floating, weight=None if in_step else 1.0)
    if name == "sum":
        found = job.sum(tensor)
    elif name in _OF_ALL:
        found = _OF_ALL[name](torch.stack(job.gather(tensor)))
    else:
        raise ValueError(f"a reduction by {how} is not supported: use mean, sum, max, min or product")
    return found.to(tensor.dtype) if isinstance(found, Tensor) else torch.tensor(found, dtype=tensor.dtype)


@contextmanager
def nothing_counts(results: Any) -> Iterator[None]:
    """What `self.log` gets here does not count in the metrics of the epoch: it is of samples that others have.

    The metrics are there all the same, as every worker takes part in their reduction.
    """
    count = results.update_metrics

    def leave_out(key: str, value: Any, batch_size: int) -> None:
        metric = results[key]
        if metric.is_tensor and metric.meta.is_mean_reduction:
            count(key, torch.zeros_like(value), 0)
        elif not metric.is_tensor or metric.meta.on_step:
            count(key, value, batch_size)
        metric.has_reset = False

    results.update_metrics = leave_out
    try:
        yield
    finally:
        del results.update_metrics


def share_metrics(module: Any, job: Job, together: Callable[[], bool]) -> None:
    """Let torchmetrics gather their state from all workers. They would ask torch.distributed."""
    try:
        from torchmetrics import Metric
    except ImportError:
        return

    def gather(tensor: Tensor, group: Any = None) -> list[Tensor]:
        return job.gather(tensor)

    for metric in module.modules():
        if isinstance(metric, Metric):
            metric.dist_sync_fn = gather
            metric.distributed_available_fn = together
