"""The jobs that may take part in a trial, and what is known of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from shoal.core.arrays import FloatArray, IntArray
from shoal.core.job import GpuRange, Job, Kind
from shoal.core.profile import Profile, Uncertainty
from shoal.core.view import View
from shoal.scheduler.exploration.trial import Member, Subject
from shoal.scheduler.exploration.worth import Sampling

#: A job of unknown length is assumed to have so much left.
UNKNOWN_S = 3600.0
#: Running jobs to look at, and jobs to consider: the search must not delay a decision.
MOST_SEEN, MOST_JOBS = 400, 32


@dataclass(frozen=True, slots=True)
class Situation:
    """What the policy has decided, and what is known of the jobs."""

    view: View
    jobs: Mapping[int, Job]
    profiles: Mapping[int, Profile]
    gpus: IntArray
    gpu_type: IntArray
    #: By GPU type: GPUs that the decision leaves idle.
    free_gpus: IntArray
    #: The range of a job, as far as the autoscaler and the rule for idle jobs let it grow.
    range_of: Callable[[int], GpuRange]
    #: By job: sizes by GPU type that limits allow, where they are below what the job could use.
    limits: Mapping[int, list[int]]
    #: Whether GPUs may go from one user to another for a trial.
    across_users: bool
    sampling: Sampling
    #: Whether this may be measured now: it is not measured already, and was not tried just before.
    may_try: Callable[[Subject], bool]
    #: Jobs in other trials.
    busy: set[int]
    #: GPU time that a trial may take.
    affordable_gpu_s: float
    now_s: float
    #: Measure only this job; others may exchange GPUs with it.
    only: int | None = None

    def may_measure(self, job_id: int, subject: Subject) -> bool:
        return self.only in (None, job_id) and self.may_try(subject)


@dataclass(frozen=True, slots=True)
class Found:
    """The best trial."""

    members: tuple[Member, ...]
    steps: int
    #: GPU time that it is expected to take.
    gpu_s: float
    limit_s: float
    value_s: float
    cost_s: float

    @property
    def surplus_s(self) -> float:
        return self.value_s - self.cost_s


@dataclass(frozen=True, slots=True)
class Candidate:
    """A running job that may take part in a trial."""

    row: int
    job_id: int
    model: str
    user: str
    gpus: int
    gpu_type: int
    sizes: range
    remaining_s: float
    speed: FloatArray
    known: Uncertainty

    @property
    def near(self) -> list[int]:
        """The sizes that it could have: up to half as many GPUs more or fewer."""
        reach = max(self.sizes.step, self.gpus // 2)
        low, high = self.gpus - reach, self.gpus + reach
        return [n for n in self.sizes if low <= n <= high and n != self.gpus and self.speed[n] > 0]


def candidates(s: Situation) -> list[Candidate]:
    """The jobs with the most time left: so many of which something could be learned, and so many for exchanges."""
    left, rate = s.view.remaining_now(s.now_s), s.view.rate
    rows = np.flatnonzero((s.gpus > 0) & (s.view.gpus > 0))
    with np.errstate(divide="ignore", invalid="ignore"):
        left_s = np.nan_to_num(left[rows] / rate[rows], nan=UNKNOWN_S)
    if s.only is not None:
        left_s[s.view.job_ids[rows] == s.only] = np.inf
    longest = np.argsort(-left_s, kind="stable")
    open_: list[Candidate] = []
    closed: list[Candidate] = []
    for row in rows[longest[:MOST_SEEN]].tolist():
        job = _candidate(s, row, float(left[row]))
        if job is not None:
            is_open = len(s.free_gpus) > 1 or any(job.known.samples[n] == 0 for n in job.near)
            (open_ if is_open else closed).append(job)
            if len(open_) >= MOST_JOBS:
                break
    return sorted(open_ + closed[:MOST_JOBS], key=lambda job: job.row)


def _candidate(s: Situation, row: int, left: float) -> Candidate | None:
    """A job that has been measured at the size that the policy gives it, and could have other sizes."""
    view = s.view
    job_id, gpus, gpu_type = view.job_at(row), int(s.gpus[row]), int(s.gpu_type[row])
    if job_id in s.busy:
        return None
    job, profile = s.jobs[job_id], s.profiles[job_id]
    known = profile.uncertain.get(view.gpu_types[gpu_type])
    if known is None or job.autoscale or job.gpu_fraction < 1 or job.kind is not Kind.ALL_REDUCE:
        return None
    speed = profile.curve(view.gpu_types[gpu_type]).speed
    if gpus >= len(speed) or not speed[gpus] > 0 or not known.samples[gpus]:
        return None
    range_ = s.range_of(job_id)
    most = min(range_.max, len(speed) - 1, len(known.samples) - 1)
    if job_id in s.limits:
        most = min(most, s.limits[job_id][gpu_type])
    remaining_s = left / float(speed[gpus]) if np.isfinite(left) else UNKNOWN_S
    sizes = range(range_.min, most + 1, range_.step)
    return Candidate(
        row, job_id, job.model or job.name, job.user, gpus, gpu_type, sizes, remaining_s, speed, known
    )
