"""Jobs with one GPU, and jobs that wait for one. Only these share GPUs."""

from __future__ import annotations

import numpy as np

from shoal.scheduler.scheduler import Scheduler


def waiting_for_one(scheduler: Scheduler) -> list[int]:
    """Jobs without a share that could begin with one GPU, in order of submission."""
    view = scheduler.view
    wants = view.min_gpus if scheduler.policy.elastic else view.requested_gpus
    return [view.job_at(row) for row in np.flatnonzero((view.gpus == 0) & (wants == 1)).tolist()]


def waits_for_one(scheduler: Scheduler, job: int) -> bool:
    """Whether the job has no share and could begin with one GPU."""
    if not waits(scheduler, job):
        return False
    view = scheduler.view
    wants = view.min_gpus if scheduler.policy.elastic else view.requested_gpus
    return bool(wants[view.row(job)] == 1)


def with_one(scheduler: Scheduler) -> list[int]:
    """Jobs that have one GPU, in order of submission."""
    view = scheduler.view
    return [view.job_at(row) for row in np.flatnonzero(view.gpus == 1).tolist()]


def has_one(scheduler: Scheduler, job: int) -> bool:
    view = scheduler.view
    return bool(job in view and view.gpus[view.row(job)] == 1)


def waits(scheduler: Scheduler, job: int) -> bool:
    """Whether the job is active and has no share."""
    view = scheduler.view
    return bool(job in view and view.gpus[view.row(job)] == 0)


def generation_of(scheduler: Scheduler, job: int) -> int:
    """The generation of an active job. It changes with the share and with the placement."""
    view = scheduler.view
    return int(view.generation[view.row(job)])
