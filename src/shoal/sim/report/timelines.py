"""The share of each job over time, for as many jobs as a page can carry."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.core.profile import Profile
from shoal.sim.record import Record

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

#: Of more jobs than this, only the longest and a sample by seed are candidates for the page.
MAX_CANDIDATES = 3_000
#: A timeline of more changes is thinned out, keeping its ups and downs.
MAX_POINTS = 240
_SAMPLE_SEED = 20_210_412


def work_gpu_s(record: Record, profiles: dict[str, Profile], gpu_type: str) -> FloatArray:
    """GPU-seconds each job needs at the size it asked for: how long it is, whatever the policy."""
    out = np.zeros(len(record.jobs))
    for i, job in enumerate(record.jobs):
        profile = profiles[job.model]
        kind = gpu_type if profile.knows(gpu_type) else profile.gpu_types[0]
        speed = profile.curve(kind).speed
        want = min(job.requested_gpus, len(speed) - 1)
        out[i] = want * (job.iterations or 0.0) / speed[want] if speed[want] > 0 else 0.0
    return out


def candidates(work: FloatArray, most: int = MAX_CANDIDATES) -> IntArray:
    """Jobs that the page may show: all, or the longest third of `most` and a sample of the others.

    It depends on the trace alone, so that every run of it keeps the same jobs.
    """
    n = len(work)
    if n <= most:
        return np.arange(n)
    by_length = np.argsort(-work, kind="stable")
    longest, others = by_length[: most // 3], by_length[most // 3 :]
    rng = np.random.default_rng(_SAMPLE_SEED)
    return np.sort(np.concatenate([longest, rng.choice(others, most - len(longest), replace=False)]))


def changes_by_job(record: Record) -> tuple[IntArray, IntArray]:
    """(order, first): entries `order[first[j]:first[j + 1]]` of the change log are job j's, in time order."""
    jobs = np.asarray(record.change_job, np.int64)
    order = np.argsort(jobs, kind="stable")
    return order, np.searchsorted(jobs[order], np.arange(len(record.jobs) + 1))


def timelines(record: Record, which: Sequence[int]) -> tuple[list[list[float]], list[list[int]]]:
    """Per job: seconds since its submission at which its share changed, and the shares from then on.

    Times are differences to the one before, in tenths of a second for jobs of less than an hour: short
    numbers, because there are many of them.
    """
    order, first = changes_by_job(record)
    times, gpus = np.asarray(record.change_s), np.asarray(record.change_gpus, np.int64)
    all_at: list[list[float]] = []
    all_gpus: list[list[int]] = []
    for j in which:
        rows = order[first[j] : first[j + 1]]
        at = times[rows] - record.jobs[j].submit_s
        keep = extremes(at, gpus[rows], MAX_POINTS)
        at = np.round(at[keep], 1 if len(at) and at[-1] < 3600 else 0)
        all_at.append(short(np.diff(at, prepend=0.0)))
        all_gpus.append(gpus[rows][keep].tolist())
    return all_at, all_gpus


def extremes(at: FloatArray, value: NDArray[Any], most: int) -> IntArray:
    """Indices of at most about `most` entries: the first, the last, and the least and greatest in between.

    Time is cut into `most` / 2 parts; of each part its least and its greatest value are kept.
    """
    n = len(at)
    if n <= most:
        return np.arange(n)
    parts = max((most - 2) // 2, 1)
    span = max(float(at[-1] - at[0]), 1e-12)
    part = np.minimum(((at - at[0]) / span * parts).astype(np.int64), parts - 1)
    rising = np.lexsort((value, part))
    starts = np.searchsorted(part[rising], np.unique(part))
    least, greatest = rising[starts], rising[np.append(starts[1:], n) - 1]
    return np.unique(np.concatenate(([0, n - 1], least, greatest)))


def short(values: Any, digits: int = 1) -> list[Any]:
    """As plain numbers that are short in JSON; what is not a number is None."""
    out: list[Any] = []
    for value in np.asarray(values, np.float64).tolist():
        if value != value or value in (float("inf"), float("-inf")):
            out.append(None)
        else:
            rounded = round(value, digits)
            out.append(int(rounded) if rounded == int(rounded) else rounded)
    return out
