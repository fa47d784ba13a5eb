"""Ends of simulated jobs other than their own: time limits, dependencies that fail, and refused submissions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from shoal.core.arrays import FloatArray
from shoal.core.job import After, Job
from shoal.scheduler.limits.waiting import refusal
from shoal.scheduler.scheduler import Scheduler


class JobEnds:
    def __init__(self, jobs: Sequence[Job], scheduler: Scheduler) -> None:
        self._jobs, self._scheduler = jobs, scheduler
        cluster = scheduler.cluster
        limits = [user.limits for user in cluster.users] + [group.limits for group in cluster.groups]
        self._refuses = any(each.max_waiting_jobs is not None for each in limits)
        self._shares_tickets = any(group.tickets is not None for group in cluster.groups)
        #: Whether anything but the policy decides when jobs run.
        self.limited = cluster.has_limits or any(job.has_conditions for job in jobs)
        self._waited_for = {after.job_id for job in jobs for after in job.after}
        #: Whether jobs that others wait for ended well.
        self._ended: dict[int, bool] = {}
        self._ran_s: dict[int, float] = {}
        self._since_s: dict[int, float] = {}
        self._figures: Counter[str] = Counter()
        #: Jobs by user that were submitted since the last decision.
        self._new: Counter[str] = Counter()

    @property
    def never(self) -> dict[int, After]:
        """Jobs that can never run, because a job that they wait for ended otherwise."""
        return self._scheduler.admission.never

    def submitted(self, j: int) -> Job | None:
        """The job without what it need not wait for any more; None if it is refused or can never run."""
        job = self._jobs[j]
        if self._refuses and self._is_refused(job):
            self._figures["jobs_refused"] += 1
            self._ended[j] = False
            return None
        past = [a for a in job.after if a.job_id in self._ended]
        if any(not a.when.allows(self._ended[a.job_id]) for a in past):
            self.withdrawn(j)
            return None
        self._new[job.user] += 1
        return replace(job, after=tuple(a for a in job.after if a not in past)) if past else job

    def decided(self) -> None:
        """The scheduler knows all jobs that were submitted."""
        self._new.clear()

    def _is_refused(self, job: Job) -> bool:
        scheduler = self._scheduler
        waiting = Counter(
            other.user
            for i, other in scheduler.jobs.items()
            if i not in scheduler.view or not scheduler.view.gpus[scheduler.view.row(i)]
        )
        return refusal(scheduler.cluster, job.user, waiting + self._new) is not None

    def ended(self, j: int, *, succeeded: bool) -> None:
        if j in self._waited_for:
            self._ended[j] = succeeded

    def withdrawn(self, j: int) -> None:
        """A job that can never run is withdrawn."""
        self.never.pop(j, None)
        self._figures["jobs_without_a_chance"] += 1
        self.ended(j, succeeded=False)

    def timed_out(self, j: int) -> None:
        self._figures["time_limits_reached"] += 1
        self.ended(j, succeeded=False)

    def holds(self, j: int, gpus: int, now_s: float) -> None:
        """The job has this many GPUs from now on."""
        if self._jobs[j].time_limit_s is None:
            return
        if j in self._since_s:
            self._ran_s[j] = self._ran_s.get(j, 0.0) + now_s - self._since_s.pop(j)
        if gpus:
            self._since_s[j] = now_s

    def limit_at(self, j: int, now_s: float) -> float | None:
        """When a running job reaches its time limit; None if it has none."""
        limit_s = self._jobs[j].time_limit_s
        if limit_s is None or j not in self._since_s:
            return None
        return max(self._since_s[j] + limit_s - self._ran_s.get(j, 0.0), now_s)

    def tickets(self, own: FloatArray) -> FloatArray:
        """The tickets of the users, where groups have some: as they are divided now."""
        if not self._shares_tickets:
            return own
        return np.array([user.tickets for user in self._scheduler.supply.cluster.users])

    def figures(self, finish_s: FloatArray) -> dict[str, Any]:
        """How many jobs ended otherwise, and how many deadlines were met; empty if no job could."""
        found: dict[str, Any] = dict(self._figures)
        due = [
            (finish_s[j], job.deadline_s) for j, job in enumerate(self._jobs) if job.deadline_s is not None
        ]
        if due:
            found |= {"deadlines": len(due), "deadlines_met": sum(end <= by for end, by in due)}
        return found
