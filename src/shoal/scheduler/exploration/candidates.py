"""Find the most valuable trial: which jobs, at which sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.core.arrays import FloatArray, IntArray
from shoal.core.job import Job, Kind
from shoal.core.profile import Profile, Uncertainty
from shoal.core.view import View
from shoal.knowledge.next_sample import best_of
from shoal.scheduler.exploration.trial import Key, Member
from shoal.scheduler.exploration.worth import Sampling, expected_improvement, gains_s

#: A job of unknown length is assumed to have so much left.
UNKNOWN_S = 3600.0
#: A trial must be worth so many times its cost.
WORTH = 2.0
#: Running jobs to look at, jobs to consider, and sizes to grow or shrink to: the search must not delay a decision.
MOST_SEEN, MOST_JOBS, MOST_SIZES = 400, 32, 96
#: Relative uncertainty of a job's speed on a GPU type that it has not run on.
UNSEEN_STD = 0.3


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
    #: By job: sizes by GPU type that limits allow, where they are below what the job could use.
    limits: Mapping[int, list[int]]
    #: Whether GPUs may go from one user to another for a trial.
    across_users: bool
    sampling: Sampling
    #: Whether this may be measured now: it was not tried in vain just before.
    may_try: Callable[[Key], bool]
    now_s: float


@dataclass(frozen=True, slots=True)
class Found:
    """The best trial."""

    members: tuple[Member, ...]
    steps: int
    time_s: float
    limit_s: float
    value_s: float
    cost_s: float


@dataclass(frozen=True, slots=True)
class _Job:
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


@dataclass(frozen=True, slots=True)
class _Sizes:
    """One entry per job and size that it could have for a while, as arrays."""

    job: NDArray[np.int64]
    gpus: NDArray[np.int64]
    mean_s: FloatArray
    std_s: FloatArray
    #: Part of the job's speed that it gains (below 0: loses) at this size, by the estimate.
    relative: FloatArray
    is_new: NDArray[np.bool_]
    #: Variance of the curve that a measurement removes, for `best_of`.
    removed: FloatArray


def find(s: Situation, busy: set[int], blocked: set[Key]) -> Found | None:
    """The trial whose value exceeds its cost most, if any does. Jobs in `busy` are in other trials."""
    jobs = _candidates(s, busy)
    best = _best_size(s, jobs, blocked)
    other = _best_type(s, jobs, blocked) if len(s.free_gpus) > 1 else None
    if best is None or (other is not None and other.value_s - other.cost_s > best.value_s - best.cost_s):
        return other
    return best


def _candidates(s: Situation, busy: set[int]) -> list[_Job]:
    """The jobs with the most time left: so many of which something could be learned, and so many for exchanges."""
    left, rate = s.view.remaining_now(s.now_s), s.view.rate
    rows = np.flatnonzero((s.gpus > 0) & (s.view.gpus > 0))
    with np.errstate(divide="ignore", invalid="ignore"):
        longest = np.argsort(-np.nan_to_num(left[rows] / rate[rows], nan=UNKNOWN_S), kind="stable")
    open_: list[_Job] = []
    closed: list[_Job] = []
    for row in rows[longest[:MOST_SEEN]].tolist():
        job = _eligible(s, row, float(left[row]), busy)
        if job is not None:
            is_open = len(s.free_gpus) > 1 or any(job.known.samples[n] == 0 for n in job.near)
            (open_ if is_open else closed).append(job)
            if len(open_) >= MOST_JOBS:
                break
    return sorted(open_ + closed[:MOST_JOBS], key=lambda job: job.row)


def _eligible(s: Situation, row: int, left: float, busy: set[int]) -> _Job | None:
    """A job that has been measured at the size that the policy gives it, and could have other sizes."""
    view = s.view
    job_id, gpus, gpu_type = view.job_at(row), int(s.gpus[row]), int(s.gpu_type[row])
    if job_id in busy:
        return None
    job, profile = s.jobs[job_id], s.profiles[job_id]
    known = profile.uncertain.get(view.gpu_types[gpu_type])
    if known is None or job.autoscale or job.gpu_fraction < 1 or job.kind is not Kind.ALL_REDUCE:
        return None
    speed = profile.curve(view.gpu_types[gpu_type]).speed
    if gpus >= len(speed) or not speed[gpus] > 0 or not known.samples[gpus]:
        return None
    most = min(job.gpus.max, len(speed) - 1, len(known.samples) - 1)
    if job_id in s.limits:
        most = min(most, s.limits[job_id][gpu_type])
    remaining_s = left / float(speed[gpus]) if np.isfinite(left) else UNKNOWN_S
    return _Job(
        row, job_id, job.model or job.name, job.user, gpus, gpu_type,
        range(job.gpus.min, most + 1, job.gpus.step), remaining_s,
        speed, known,
    )  # fmt: skip


def key_of(model: str, gpu_type: str, gpus: int) -> Key:
    return model, gpu_type, gpus


def _sizes(s: Situation, jobs: list[_Job], blocked: set[Key]) -> _Sizes:
    """The sizes that jobs could have."""
    parts: list[tuple[NDArray[Any], ...]] = []
    for index, job in enumerate(jobs):
        sizes = np.array(job.near, np.int64)
        if not len(sizes):
            continue
        gpu_type = s.view.gpu_types[job.gpu_type]
        mean_s, std_s = gains_s(
            job.remaining_s, job.speed, job.known.relative_std[: len(job.speed)], job.gpus
        )
        is_new = job.known.samples[sizes] == 0
        for at in np.flatnonzero(is_new).tolist():
            key = key_of(job.model, gpu_type, int(sizes[at]))
            is_new[at] = key not in blocked and s.may_try(key)
        relative = job.speed[sizes] / job.speed[job.gpus] - 1.0
        parts.append(
            (
                np.full(len(sizes), index),
                sizes,
                mean_s[sizes],
                std_s[sizes],
                relative,
                is_new,
                job.known.variance_removed[sizes],
            )
        )
    if not parts:
        empty: FloatArray = np.empty(0)
        none = np.empty(0, np.int64)
        return _Sizes(none, none, empty, empty, empty, np.empty(0, np.bool_), empty)
    return _Sizes(*(np.concatenate(column) for column in zip(*parts)))


def _best_size(s: Situation, jobs: list[_Job], blocked: set[Key]) -> Found | None:
    sizes = _sizes(s, jobs, blocked)
    if not sizes.is_new.any():
        return None
    change = sizes.gpus - np.array([job.gpus for job in jobs], np.int64)[sizes.job]
    types = np.array([job.gpu_type for job in jobs], np.int64)[sizes.job]
    rows = np.array([job.row for job in jobs], np.int64)[sizes.job]
    users = s.view.user[rows]
    hoped_s = sizes.mean_s + 2.0 * sizes.std_s
    up, down = (_most_hopeful(np.flatnonzero(side), hoped_s) for side in (change > 0, change < 0))
    alone = up[sizes.is_new[up] & (change[up] <= s.free_gpus[types[up]])]
    fits = (change[up][:, None] == -change[down]) & (types[up][:, None] == types[down])
    fits &= sizes.job[up][:, None] != sizes.job[down]
    fits &= sizes.is_new[up][:, None] | sizes.is_new[down]
    if not s.across_users:
        fits &= users[up][:, None] == users[down]
    first, second = np.nonzero(fits)
    # A job shrinks alone only if no other job could use its GPUs meanwhile.
    could_grow = (s.gpus > 0) & (s.gpus < s.view.max_gpus)
    others = np.bincount(s.gpu_type[could_grow], minlength=len(s.free_gpus))[types] - could_grow[rows]
    fewer = down[sizes.is_new[down] & (others[down] == 0)]
    nobody: IntArray = np.full(max(len(alone), len(fewer)), -1)
    pairs = np.concatenate(
        [
            [alone, nobody[: len(alone)]],
            [nobody[: len(fewer)], fewer],
            [up[first], down[second]],
        ],
        axis=1,
    )
    return _choose(s, jobs, sizes, pairs)


def _most_hopeful(entries: NDArray[np.int64], hoped_s: FloatArray) -> NDArray[np.int64]:
    """The entries that could gain most, in their order."""
    if len(entries) <= MOST_SIZES:
        return entries
    return np.sort(entries[np.argsort(-hoped_s[entries], kind="stable")[:MOST_SIZES]])


def _choose(s: Situation, jobs: list[_Job], sizes: _Sizes, pairs: NDArray[np.int64]) -> Found | None:
    """The best pair decides which job is measured; `next_sample` decides at which of its sizes."""
    if not pairs.size:
        return None
    up, down = pairs

    def both(values: FloatArray) -> tuple[FloatArray, FloatArray]:
        return np.where(up >= 0, values[up], 0.0), np.where(down >= 0, values[down], 0.0)

    (mean_up, mean_down), (std_up, std_down) = both(sizes.mean_s), both(sizes.std_s)
    value_s = expected_improvement(mean_up + mean_down, np.hypot(std_up, std_down))
    loss_up, loss_down = both(sizes.relative)
    step_s = np.array([1.0 / jobs[j].speed[n] for j, n in zip(sizes.job, sizes.gpus)])
    time_s = np.maximum(*both(np.array([_trial_s(s.sampling, x) for x in step_s])))
    members = (up >= 0).astype(float) + (down >= 0)
    cost_s = 2.0 * s.sampling.pause_s * members + np.maximum(-(loss_up + loss_down), 0.0) * time_s
    worth = value_s > WORTH * cost_s
    if not worth.any():
        return None
    best = int(np.argmax(np.where(worth, value_s - cost_s, -np.inf)))
    measured = _measured(sizes, int(up[best]), int(down[best]))
    job = sizes.job[measured]
    # The sizes of this job that are worth a trial, and for each the best exchange.
    of_job: dict[int, int] = {}
    for i in np.argsort(value_s - cost_s).tolist():
        at = _measured(sizes, int(up[i]), int(down[i]))
        if worth[i] and sizes.job[at] == job:
            of_job[at] = i
    entries = list(of_job)
    moved = np.abs(sizes.gpus[entries] - jobs[job].gpus).astype(float)
    chosen = of_job[entries[best_of(sizes.removed[entries], moved)]]
    pair = [i for i in (int(up[chosen]), int(down[chosen])) if i >= 0]
    return _found(s, jobs, sizes, pair, float(value_s[chosen]), float(cost_s[chosen]))


def _measured(sizes: _Sizes, up: int, down: int) -> int:
    """Of the two sizes of a pair, the one that is measured; of two, the more uncertain one."""
    new = [i for i in (up, down) if i >= 0 and sizes.is_new[i]]
    return max(new, key=lambda i: sizes.std_s[i])


def _trial_s(sampling: Sampling, step_s: float) -> float:
    return sampling.trial_time_s(sampling.samples(step_s), step_s)


def _found(
    s: Situation, jobs: list[_Job], sizes: _Sizes, pair: list[int], value_s: float, cost_s: float
) -> Found:
    members, steps, time_s, limit_s = [], 0, 0.0, 0.0
    for i in pair:
        job, gpus = jobs[sizes.job[i]], int(sizes.gpus[i])
        step_s = 1.0 / float(job.speed[gpus])
        samples = s.sampling.samples(step_s) if sizes.is_new[i] else 0
        key = key_of(job.model, s.view.gpu_types[job.gpu_type], gpus) if samples else None
        members.append(Member(job.job_id, gpus, job.gpu_type, job.gpus, job.gpu_type, samples, key))
        if samples:
            steps = max(steps, s.sampling.steps_of(samples, step_s))
            time_s = max(time_s, s.sampling.trial_time_s(samples, step_s))
            limit_s = max(limit_s, s.sampling.limit_s(samples, step_s))
    return Found(tuple(members), steps, time_s, limit_s, value_s, cost_s)


def _best_type(s: Situation, jobs: list[_Job], blocked: set[Key]) -> Found | None:
    """A job moves to a GPU type that no job of its user and model has run on: to idle GPUs, or in exchange."""
    best: Found | None = None
    for job in jobs:
        for gpu_type, name in enumerate(s.view.gpu_types):
            key: Key = (job.model, name, job.user)
            profile = s.profiles[job.job_id]
            if (
                gpu_type == job.gpu_type
                or name in profile.uncertain
                or key in blocked
                or not s.may_try(key)
                or s.view.type_max[gpu_type, job.row] < job.gpus
            ):
                continue
            partner = None
            if s.free_gpus[gpu_type] < job.gpus:
                partner = next((other for other in jobs if _may_swap(s, job, other, gpu_type)), None)
                if partner is None:
                    continue
            step_s = 1.0 / float(job.speed[job.gpus])
            samples = s.sampling.samples(step_s)
            moved = [Member(job.job_id, job.gpus, gpu_type, job.gpus, job.gpu_type, samples, key)]
            if partner is not None:
                moved.append(
                    Member(partner.job_id, partner.gpus, job.gpu_type, partner.gpus, gpu_type, 0, None)
                )
            value_s = float(expected_improvement(np.zeros(1), np.array([UNSEEN_STD * job.remaining_s]))[0])
            time_s = s.sampling.trial_time_s(samples, step_s)
            cost_s = len(moved) * (2.0 * s.sampling.pause_s + UNSEEN_STD * time_s)
            if value_s > WORTH * cost_s and (best is None or value_s - cost_s > best.value_s - best.cost_s):
                steps, limit_s = s.sampling.steps_of(samples, step_s), s.sampling.limit_s(samples, step_s)
                best = Found(tuple(moved), steps, time_s, limit_s, value_s, cost_s)
    return best


def _may_swap(s: Situation, job: _Job, other: _Job, gpu_type: int) -> bool:
    return (
        other.gpu_type == gpu_type
        and other.gpus == job.gpus
        and other.job_id != job.job_id
        and bool(s.view.type_max[job.gpu_type, other.row] >= other.gpus)
        and (s.across_users or other.user == job.user)
    )
