"""Schedules of the learning rate that the job does not know: they would begin anew in every newcomer."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

import torch

DEPTH = 4
"""How deep a schedule may be within something registered: a SequentialLR, a wrapper, a list."""


def check_registered(optimizers: Iterable[torch.optim.Optimizer], registered: Iterable[Any]) -> None:
    """Refuse schedules of these optimizers that are not among what travels with the job."""
    mine, known = {id(o) for o in optimizers}, _within(list(registered))
    if not _unknown(mine, known):
        return
    gc.collect()  # one that the script has dropped may still be in memory
    if unknown := _unknown(mine, known):
        raise RuntimeError(
            f"the job does not know the schedule {type(unknown[0]).__name__} of its optimizer, which would begin anew "
            "in each new worker and after a restart: pass it to job.wrap(model, optimizer, schedulers=[scheduler]) "
            "(or job.shard), or put it into job.state"
        )


def _unknown(optimizers: set[int], known: set[int]) -> list[Any]:
    """torch keeps no list of an optimizer's schedules, and not all leave a mark on it. So look at all objects."""
    found = (o for o in gc.get_objects() if issubclass(type(o), LRScheduler))
    return [s for s in found if id(getattr(s, "optimizer", None)) in optimizers and id(s) not in known]


def _within(values: list[Any], depth: int = DEPTH) -> set[int]:
    """The schedules within these values."""
    found: set[int] = set()
    for value in values:
        if isinstance(value, LRScheduler):
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
