"""How far a job has come over time, from the changes of its share.

The record holds shares, not progress; the speed at each share is the profile's, and the standstill of each
reconfiguration the mean that the record has for the job. That is exact for a pool of GPUs without costs and
with stop-and-restart. With concurrent reconfiguration a larger share counts from its command on rather than
from the end of its preparation, and on nodes of several types the type and spread of the share are not
known: there the curve is scaled so that it ends at 1 when the job did.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shoal.core.profile import Profile
from shoal.sim.record import Record

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Curve:
    """Part of the work done, at times since submission; straight in between."""

    time_s: FloatArray
    done: FloatArray


def watched_job(record: Record, work: FloatArray) -> int:
    """The job to watch: the one submitted first (of several the largest), if it has some work.

    What ends after less than an average job's work sees nothing of the trace: then it is the largest of
    the first twenty jobs.
    """
    submit = np.array([job.submit_s for job in record.jobs])
    first = np.flatnonzero(submit == submit.min())
    if work[first].max() < work.mean():
        first = np.argsort(submit, kind="stable")[:20]
    return int(first[np.argmax(work[first])])


def progress_of(record: Record, j: int, profile: Profile, gpu_type: str) -> Curve:
    """The progress of job `j` from its submission to its end, or to the end of the run."""
    job = record.jobs[j]
    mine = np.flatnonzero(np.asarray(record.change_job, np.int64) == j)
    times = np.asarray(record.change_s)[mine] - job.submit_s
    gpus = np.asarray(record.change_gpus, np.int64)[mine]
    finished = bool(np.isfinite(record.finish_s[j]))
    end_s = float(record.finish_s[j] if finished else record.end_s) - job.submit_s
    kind = gpu_type if profile.knows(gpu_type) else profile.gpu_types[0]
    speed = profile.curve(kind).speed
    still_s = standstill_s(record, j, gpus)
    at, done, total = [0.0], [0.0], job.iterations or np.inf
    for k, (now, share) in enumerate(zip(times.tolist(), gpus.tolist())):
        until = times[k + 1] if k + 1 < len(times) else end_s
        begins = min(now + (still_s if k and share else 0.0), until)
        rate = float(speed[min(share, len(speed) - 1)])
        at += [now, begins, float(until)]
        done += [done[-1], done[-1], done[-1] + rate * float(until - begins)]
    part = np.array(done) / total
    if finished and part[-1] > 0:
        part /= part[-1]
    return Curve(np.array(at), np.minimum(part, 1.0))


def standstill_s(record: Record, j: int, gpus: NDArray[np.int64]) -> float:
    """Seconds that a reconfiguration of the job took on average; its first start is free."""
    paid = int((gpus[1:] > 0).sum())
    return float(record.paused_s[j]) / paid if paid else 0.0
