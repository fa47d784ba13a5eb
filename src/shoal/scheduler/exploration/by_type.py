"""Find the most valuable trial on another GPU type."""

from __future__ import annotations

import numpy as np

from shoal.scheduler.exploration.candidates import Candidate, Found, Situation
from shoal.scheduler.exploration.trial import Member, OnType
from shoal.scheduler.exploration.worth import WORTH, expected_improvement

#: Relative uncertainty of a job's speed on a GPU type that it has not run on.
UNSEEN_STD = 0.3


def best_by_type(s: Situation, jobs: list[Candidate]) -> Found | None:
    """A job moves to a GPU type that no job of its user and model has run on: to idle GPUs, or in exchange."""
    every = [_visit(s, jobs, job, gpu_type) for job in jobs for gpu_type in range(len(s.view.gpu_types))]
    found = [visit for visit in every if visit is not None]
    return max(found, key=lambda visit: visit.surplus_s, default=None)


def _visit(s: Situation, jobs: list[Candidate], job: Candidate, gpu_type: int) -> Found | None:
    """The job on this type for some steps, if it may be and is worth it."""
    name = s.view.gpu_types[gpu_type]
    subject = OnType(job.model, name, job.user)
    if (
        gpu_type == job.gpu_type
        or name in s.profiles[job.job_id].uncertain
        or not s.may_measure(job.job_id, subject)
        or s.view.type_max[gpu_type, job.row] < job.gpus
    ):
        return None
    step_s = 1.0 / float(job.speed[job.gpus])
    samples = s.sampling.samples(step_s)
    moved = [Member(job.job_id, job.gpus, gpu_type, job.gpus, job.gpu_type, samples, subject)]
    if s.free_gpus[gpu_type] < job.gpus:
        other = next((other for other in jobs if _may_swap(s, job, other, gpu_type)), None)
        if other is None:
            return None
        moved.append(Member(other.job_id, other.gpus, job.gpu_type, other.gpus, gpu_type, 0, None))
    value_s = float(expected_improvement(np.zeros(1), np.array([UNSEEN_STD * job.remaining_s]))[0])
    time_s = s.sampling.trial_time_s(samples, step_s)
    cost_s = len(moved) * (2.0 * s.sampling.pause_s + UNSEEN_STD * time_s)
    gpu_s = len(moved) * job.gpus * time_s
    if value_s <= WORTH * cost_s or gpu_s > s.affordable_gpu_s:
        return None
    steps, limit_s = s.sampling.steps_of(samples, step_s), s.sampling.limit_s(samples, step_s)
    return Found(tuple(moved), steps, gpu_s, limit_s, value_s, cost_s)


def _may_swap(s: Situation, job: Candidate, other: Candidate, gpu_type: int) -> bool:
    return (
        other.gpu_type == gpu_type
        and other.gpus == job.gpus
        and other.job_id != job.job_id
        and bool(s.view.type_max[job.gpu_type, other.row] >= other.gpus)
        and (s.across_users or other.user == job.user)
    )
