"""The share of each job over time."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.core.profile import Profile
from shoal.sim.run_record import RunRecord

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

#: Time unit of changes; ten times as much if the numbers would not fit into four bytes.
UNIT_S = 0.1


def work_gpu_s(record: RunRecord, profiles: dict[str, Profile], gpu_type: str) -> FloatArray:
    """GPU-seconds that each job needs at its requested size, independent of the policy."""
    out = np.zeros(len(record.jobs))
    for i, job in enumerate(record.jobs):
        profile = profiles[job.model]
        kind = gpu_type if profile.knows(gpu_type) else profile.gpu_types[0]
        speed = profile.curve(kind).speed
        want = min(job.requested_gpus, len(speed) - 1)
        out[i] = want * (job.iterations or 0.0) / speed[want] if speed[want] > 0 else 0.0
    return out


def changes_by_job(record: RunRecord) -> tuple[IntArray, IntArray]:
    """(order, first): entries `order[first[j]:first[j + 1]]` of the change log belong to job j, in time order."""
    jobs = np.asarray(record.change_job, np.int64)
    order = np.argsort(jobs, kind="stable")
    return order, np.searchsorted(jobs[order], np.arange(len(record.jobs) + 1))


def timelines(record: RunRecord) -> dict[str, Any]:
    """The number of share changes of each job (`points`), their times and new shares, job by job.

    `at` is the time since the previous change (for the first one: since submission), in units of `unit_s`. `guests`
    are the positions of the changes at which the job becomes co-located, among the changes of all jobs.
    """
    order, first = changes_by_job(record)
    points = np.diff(first)
    submit_s = np.repeat([job.submit_s for job in record.jobs], points)
    after_s, unit_s = np.asarray(record.change_s, np.float64)[order] - submit_s, UNIT_S
    while len(after_s) and after_s.max() / unit_s >= 2**32:
        unit_s *= 10
    at = np.rint(after_s / unit_s)
    steps = np.diff(at, prepend=0.0)
    begins = first[:-1][points > 0]
    steps[begins] = at[begins]
    gpus = np.asarray(record.change_gpus, np.int64)[order]
    guests = np.flatnonzero(np.isin(order, record.colocation_changes) & (gpus > 0))
    return {"points": points, "at": steps.astype(np.int64), "gpus": gpus, "guests": guests, "unit_s": unit_s}


def extremes(at: FloatArray, value: NDArray[Any], most: int) -> IntArray:
    """Indices of at most about `most` entries: the first, the last, and the extremes in between.

    Time is divided into `most` / 2 parts; the smallest and the largest value of each part are kept.
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
    """Rounded numbers that are short in JSON; nan becomes None."""
    out: list[Any] = []
    for value in np.asarray(values, np.float64).tolist():
        if value != value or value in (float("inf"), float("-inf")):
            out.append(None)
        else:
            rounded = round(value, digits)
            out.append(int(rounded) if rounded == int(rounded) else rounded)
    return out
