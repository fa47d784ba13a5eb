"""What a script keeps beside the model and must travel: schedules of the learning rate, scalers, averages of weights.

Those that the job does not know would begin anew in every newcomer.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import Any

from torch.amp.grad_scaler import GradScaler
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel

import torch

DEPTH = 4
"""How deep one may be within something registered: a SequentialLR, a wrapper, a list."""

KINDS = (LRScheduler, GradScaler, AveragedModel)


def check_registered(
    optimizers: Iterable[torch.optim.Optimizer], registered: Iterable[Any], sharded: bool = False
) -> None:
    """Refuse schedules of these optimizers, scalers and averages that are not among what travels with the job.

    A `sharded` model has no averages that could travel.
    """
    mine, known = {id(o) for o in optimizers}, _within(list(registered))
    if not _unknown(mine, known, sharded):
        return
    gc.collect()  # one that the script has dropped may still be in memory
    if unknown := _unknown(mine, known, sharded):
        what, advice = type(unknown[0]).__name__, "put it into job.state, on every worker"
        if isinstance(unknown[0], LRScheduler):
            what = f"schedule {what} of its optimizer"
            advice = "pass it to job.wrap(model, optimizer, schedulers=[scheduler]) (or job.shard), or put it into "
            advice += "job.state"
        raise RuntimeError(
            f"the job does not know the {what}, which would begin anew in each new worker and after a restart: {advice}"
        )


def _unknown(optimizers: set[int], known: set[int], sharded: bool) -> list[Any]:
    """torch keeps no list of an optimizer's schedules, and not all leave a mark on it. So look at all objects."""
    found = [o for o in gc.get_objects() if issubclass(type(o), KINDS) and id(o) not in known]
    return [o for o in found if _trains(o, optimizers, sharded)]


def _trains(value: Any, optimizers: set[int], sharded: bool) -> bool:
    if isinstance(value, LRScheduler):
        return id(getattr(value, "optimizer", None)) in optimizers
    return value.is_enabled() if isinstance(value, GradScaler) else not sharded


def _within(values: list[Any], depth: int = DEPTH) -> set[int]:
    """What of these kinds is within these values."""
    found: set[int] = set()
    for value in values:
        if isinstance(value, KINDS):
            found.add(id(value))
        if depth == 0:
            continue
        if isinstance(value, dict):
            found |= _within(list(value.values()), depth - 1)
        elif isinstance(value, (list, tuple)):
            found |= _within(list(value), depth - 1)
        elif hasattr(value, "state_dict") and hasattr(value, "__dict__"):
            found |= _within(list(vars(value).values()), depth - 1)
    return found
