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


def reduce_epochs(results: Any) -> None:
    """The metrics of an epoch are those of all workers, also where the script leaves out `sync_dist=True`.

    Callbacks and schedulers decide by them. Each worker would decide by its own part of the data.
    """
    found = results._get_cache

    def of_all(metric: Any, on_step: bool) -> Any:
        sync, asked = metric.meta.sync, metric.meta.sync.should
        sync.should = asked or (metric.is_tensor and not on_step)
        try:
            return found(metric, on_step)
        finally:
            sync.should = asked  # `self.log` compares it with its arguments

    results._get_cache = of_all


def forget(results: Any) -> None:
    """What was logged so far does not count. The metrics stay: the epoch may end before the next batch."""
    known = [metric for metric in results.values() if not metric.has_reset]
    results.reset()
    for metric in known:
        metric.has_reset = False


@contextmanager
def nothing_counts(results: Any, module: Any) -> Iterator[None]:
    """Leave what `self.log` and torchmetrics get here out of the epoch's metrics: others already count these samples.

    The metrics are there all the same, as every worker takes part in their reduction.
    """
    with _unchanged_metrics(module), _uncounted(results):
        yield


@contextmanager
def _uncounted(results: Any) -> Iterator[None]:
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


@contextmanager
def _unchanged_metrics(module: Any) -> Iterator[None]:
    """The torchmetrics of the module have afterwards the state that they had before, in the same tensors and lists.

    Metrics of a collection may share them.
    """
    metrics = _metrics_of(module)
    before = [{name: getattr(metric, name) for name in metric._defaults} for metric in metrics]
    values = [{name: _copy(state) for name, state in states.items()} for states in before]
    counts = [metric._update_count for metric in metrics]
    yield
    for metric, states, kept, count in zip(metrics, before, values, counts, strict=True):
        for name, state in states.items():
            if isinstance(state, Tensor):
                state.copy_(kept[name])
            else:
                state[:] = kept[name]
            setattr(metric, name, state)
        metric._update_count, metric._computed = count, None


def _copy(state: Any) -> Any:
    return state.clone() if isinstance(state, Tensor) else list(state)


def _metrics_of(module: Any) -> list[Any]:
    try:
        from torchmetrics import Metric
    except ImportError:
        return []
    return [metric for metric in module.modules() if isinstance(metric, Metric)]


def share_metrics(module: Any, job: Job, together: Callable[[], bool]) -> None:
    """Let torchmetrics gather their state from all workers. They would ask torch.distributed."""

    def gather(tensor: Tensor, group: Any = None) -> list[Tensor]:
        return job.gather(tensor)

    for metric in _metrics_of(module):
        metric.dist_sync_fn = gather
        metric.distributed_available_fn = together
