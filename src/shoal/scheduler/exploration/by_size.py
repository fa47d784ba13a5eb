"""Find the most valuable trial at another size: a job alone, or two jobs that exchange GPUs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shoal.core.arrays import FloatArray
from shoal.knowledge.next_sample import best_of
from shoal.scheduler.exploration.candidates import Candidate, Found, Situation
from shoal.scheduler.exploration.trial import AtSize, Member
from shoal.scheduler.exploration.worth import WORTH, expected_improvement, gains_s

#: Sizes to grow or shrink to: the search must not delay a decision.
MOST_SIZES = 96
#: The entry of `_Sizes` that stands for no job: the last one.
NOBODY = -1

Entries = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Sizes:
    """One entry per job and size that it could have for a while, as arrays; the last one stands for nobody.

    Nobody needs no GPUs, and gains, loses and takes nothing. So the trial of one job is a pair, too: with nobody.

    Example: A and B have 2 GPUs each, and could have 1 or 3. The entries are 0: A at 1, 1: A at 3, 2: B at 1, 3: B at
    3, and 4: nobody, which is also entry -1.
    """

    job: Entries
    gpus: Entries
    #: GPUs more than the job has; below 0 if it shrinks.
    more_gpus: Entries
    gpu_type: Entries
    row: Entries
    #: Completion time that the job gains at this size.
    mean_s: FloatArray
    std_s: FloatArray
    #: Part of the job's speed that it gains (below 0: loses) at this size, by the estimate.
    relative: FloatArray
    #: How long a trial at this size takes.
    trial_s: FloatArray
    is_new: NDArray[np.bool_]
    #: Variance of the curve that a measurement removes, for `best_of`.
    removed: FloatArray


@dataclass(frozen=True, slots=True)
class _Pairs:
    """Trials: the entry of the job that grows and that of the job that shrinks by as many GPUs; one may be nobody.

    In the example of `_Sizes`: (1, 2), A takes a GPU of B; (3, 0), B takes one of A; and, if a GPU is idle, (1, -1)
    and (3, -1), where A or B takes that one.
    """

    up: Entries
    down: Entries


@dataclass(frozen=True, slots=True)
class _Worth:
    """By pair: which of its jobs are measured, what it is worth and costs, and whether it may begin.

    Of two sizes that are new, one may take too much GPU time: then only the other is measured.
    """

    measures_up: NDArray[np.bool_]
    measures_down: NDArray[np.bool_]
    value_s: FloatArray
    cost_s: FloatArray
    gpu_s: FloatArray
    may_begin: NDArray[np.bool_]


def best_by_size(s: Situation, jobs: list[Candidate]) -> Found | None:
    """The best pair decides which job is measured; `next_sample` decides at which of its sizes."""
    sizes = _sizes(s, jobs)
    if not sizes.is_new.any():
        return None
    pairs = _pairs(s, sizes)
    worth = _worth(s, sizes, pairs)
    if not worth.may_begin.any():
        return None
    surplus_s = np.where(worth.may_begin, worth.value_s - worth.cost_s, -np.inf)
    best = int(np.argmax(surplus_s))
    job = sizes.job[_measured(sizes, pairs, worth, best)]
    # The sizes at which this job may be measured, and the best pair for each: the last one in ascending order.
    pair_of: dict[int, int] = {}
    for pair in np.argsort(surplus_s).tolist():
        if worth.may_begin[pair]:
            entry = _measured(sizes, pairs, worth, pair)
            if sizes.job[entry] == job:
                pair_of[entry] = pair
    entries = list(pair_of)
    moved_gpus = np.abs(sizes.more_gpus[entries]).astype(float)
    chosen = pair_of[entries[best_of(sizes.removed[entries], moved_gpus)]]
    return _found(s, jobs, sizes, pairs, worth, chosen)


def _sizes(s: Situation, jobs: list[Candidate]) -> _Sizes:
    """The sizes that jobs could have."""
    rows: list[tuple[float, ...]] = []
    for index, job in enumerate(jobs):
        gpu_type = s.view.gpu_types[job.gpu_type]
        std = job.known.relative_std[: len(job.speed)]
        gain_s, gain_std_s = gains_s(job.remaining_s, job.speed, std, job.gpus)
        for n in job.near:
            is_new = job.known.samples[n] == 0 and s.may_measure(job.job_id, AtSize(job.model, gpu_type, n))
            relative = job.speed[n] / job.speed[job.gpus] - 1.0
            trial_s = s.sampling.expected_s(1.0 / float(job.speed[n]))
            rows.append(
                (
                    *(index, n, n - job.gpus, job.gpu_type, job.row),
                    *(gain_s[n], gain_std_s[n], relative, trial_s, is_new, job.known.variance_removed[n]),
                )
            )
    rows.append((NOBODY, 0, 0, 0, 0, 0.0, 0.0, 0.0, 0.0, False, 0.0))
    columns = np.array(rows, float).T
    job, gpus, more_gpus, types, row = columns[:5].astype(np.int64)
    mean_s, std_s, relative, trial_s, is_new, removed = columns[5:]
    return _Sizes(
        job, gpus, more_gpus, types, row, mean_s, std_s, relative, trial_s, is_new.astype(np.bool_), removed
    )


def _pairs(s: Situation, sizes: _Sizes) -> _Pairs:
    """The pairs of which at least one size is new, and that need only GPUs of their own and idle ones."""
    more_gpus, types, is_new = sizes.more_gpus, sizes.gpu_type, sizes.is_new
    hoped_s = sizes.mean_s + 2.0 * sizes.std_s
    up, down = (_most_hopeful(np.flatnonzero(side), hoped_s) for side in (more_gpus > 0, more_gpus < 0))
    alone = up[is_new[up] & (more_gpus[up] <= s.free_gpus[types[up]])]
    fits = (more_gpus[up][:, None] == -more_gpus[down]) & (types[up][:, None] == types[down])
    fits &= sizes.job[up][:, None] != sizes.job[down]
    fits &= is_new[up][:, None] | is_new[down]
    if not s.across_users:
        user = s.view.user[sizes.row]
        fits &= user[up][:, None] == user[down]
    first, second = np.nonzero(fits)
    # A job shrinks alone only if no other job could use its GPUs meanwhile.
    could_grow = (s.gpus > 0) & (s.gpus < s.view.max_gpus)
    others = np.bincount(s.gpu_type[could_grow], minlength=len(s.free_gpus))[types] - could_grow[sizes.row]
    fewer = down[is_new[down] & (others[down] == 0)]
    return _Pairs(
        np.concatenate([alone, np.full(len(fewer), NOBODY), up[first]]),
        np.concatenate([np.full(len(alone), NOBODY), fewer, down[second]]),
    )


def _most_hopeful(entries: Entries, hoped_s: FloatArray) -> Entries:
    """The entries that could gain most, in their order."""
    if len(entries) <= MOST_SIZES:
        return entries
    return np.sort(entries[np.argsort(-hoped_s[entries], kind="stable")[:MOST_SIZES]])


def _worth(s: Situation, sizes: _Sizes, pairs: _Pairs) -> _Worth:
    up, down = pairs.up, pairs.down
    moved_gpus = np.maximum(sizes.more_gpus[up], -sizes.more_gpus[down])

    def measured(entries: Entries) -> tuple[NDArray[np.bool_], FloatArray, FloatArray]:
        """Whether they are measured, how long that takes, and the uncertainty that the trial removes."""
        new, trial_s = sizes.is_new[entries], sizes.trial_s[entries]
        measures = new & (moved_gpus * trial_s <= s.affordable_gpu_s)
        return (
            measures,
            np.where(measures, trial_s, 0.0),
            np.where(measures == new, sizes.std_s[entries], 0.0),
        )

    (measures_up, up_s, up_std_s), (measures_down, down_s, down_std_s) = measured(up), measured(down)
    time_s = np.maximum(up_s, down_s)
    value_s = expected_improvement(sizes.mean_s[up] + sizes.mean_s[down], np.hypot(up_std_s, down_std_s))
    lost = np.maximum(-(sizes.relative[up] + sizes.relative[down]), 0.0)
    members = (sizes.job[up] != NOBODY).astype(float) + (sizes.job[down] != NOBODY)
    cost_s = 2.0 * s.sampling.pause_s * members + lost * time_s
    may_begin = (measures_up | measures_down) & (value_s > WORTH * cost_s)
    return _Worth(measures_up, measures_down, value_s, cost_s, moved_gpus * time_s, may_begin)


def _measured(sizes: _Sizes, pairs: _Pairs, worth: _Worth, pair: int) -> int:
    """Of the two entries of a pair, the one that is measured; of two, the more uncertain one."""
    sides = (pairs.up, worth.measures_up), (pairs.down, worth.measures_down)
    new = [int(entries[pair]) for entries, measures in sides if measures[pair]]
    return max(new, key=lambda entry: sizes.std_s[entry])


def _found(
    s: Situation, jobs: list[Candidate], sizes: _Sizes, pairs: _Pairs, worth: _Worth, pair: int
) -> Found:
    members, steps, limit_s = [], 0, 0.0
    for entries, measures in (pairs.up, worth.measures_up), (pairs.down, worth.measures_down):
        entry = int(entries[pair])
        if sizes.job[entry] == NOBODY:
            continue
        job, gpus = jobs[sizes.job[entry]], int(sizes.gpus[entry])
        step_s = 1.0 / float(job.speed[gpus])
        samples = s.sampling.samples(step_s) if measures[pair] else 0
        subject = AtSize(job.model, s.view.gpu_types[job.gpu_type], gpus) if samples else None
        members.append(Member(job.job_id, gpus, job.gpu_type, job.gpus, job.gpu_type, samples, subject))
        if samples:
            steps = max(steps, s.sampling.steps_of(samples, step_s))
            limit_s = max(limit_s, s.sampling.limit_s(samples, step_s))
    value_s, cost_s, gpu_s = (float(a[pair]) for a in (worth.value_s, worth.cost_s, worth.gpu_s))
    return Found(tuple(members), steps, gpu_s, limit_s, value_s, cost_s)
