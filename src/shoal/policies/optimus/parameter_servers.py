"""Optimus for parameter-server jobs (EuroSys'18): servers and workers by marginal gain.

With f_j(p, w) the speed of job j with p servers and w workers, and Q_j its remaining work, the gain of one more
task is

    worker: (Q_j/f_j(p, w) - Q_j/f_j(p, w+1)) / O_w       server: (Q_j/f_j(p, w) - Q_j/f_j(p+1, w)) / O_p

seconds per unit. O is the amount that a task takes of its dominant resource, the resource of which it takes the
largest fraction of the cluster. Every job first gets one server and one worker, in order of arrival, so that none
starves. Then the task with the largest gain is added, again and again. A server wins a tie. The gains of young
jobs, whose predictions are not yet reliable, are multiplied by a factor below 1.

The allocation ends when no gain is above 0, or at the first task that does not fit. With `skip_misfits`, a job
whose task does not fit gets no further task and the others continue.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np

from shoal.core.arrays import BoolArray, FloatArray, IntArray
from shoal.core.compiled import kernel
from shoal.core.errors import ShoalError

YOUNG_FACTOR = 0.95
_ROUNDING = 1e-9


@dataclass(frozen=True, eq=False)
class Tasks:
    """Parameter servers and workers of each job; 0 and 0 for a waiting job."""

    ps: IntArray
    workers: IntArray


def allocate(
    left: FloatArray,
    speed: FloatArray,
    ps_needs: FloatArray,
    worker_needs: FloatArray,
    capacity: FloatArray,
    *,
    least_workers: IntArray | None = None,
    young: BoolArray | None = None,
    young_factor: float = YOUNG_FACTOR,
    skip_misfits: bool = False,
) -> Tasks:
    """Servers and workers for jobs in order of arrival.

    left: [job], remaining steps. speed: [job, p-1, w-1], steps per second; its shape bounds p and w, and 0 marks
    sizes that a job may not have. Needs of one task: [job, resource]. capacity: [resource], of the cluster.
    least_workers: [job], the workers that a job starts with; 1 by default.
    """
    left = np.asarray(left, np.float64)
    speed = np.ascontiguousarray(speed, np.float64)
    ps_needs = np.ascontiguousarray(ps_needs, np.float64)
    worker_needs = np.ascontiguousarray(worker_needs, np.float64)
    capacity = np.asarray(capacity, np.float64)
    jobs, resources = len(left), len(capacity)
    if speed.shape[:1] != (jobs,) or speed.ndim != 3:
        raise ShoalError(f"speed must be [job, servers, workers] for {jobs} jobs, not {speed.shape}")
    if ps_needs.shape != (jobs, resources) or worker_needs.shape != (jobs, resources):
        raise ShoalError(f"needs must be given for {jobs} jobs and {resources} resources")
    if not (
        np.isfinite(left).all() and np.isfinite(speed).all() and (left >= 0).all() and (speed >= 0).all()
    ):
        raise ShoalError(
            "the remaining steps and the speeds must be finite and not negative; leave out jobs of unknown length"
        )
    factor = np.ones(jobs) if young is None else np.where(young, young_factor, 1.0)
    ps, workers = _allocate(
        left * factor,
        speed,
        np.ones(jobs, np.int32) if least_workers is None else least_workers,
        ps_needs,
        worker_needs,
        capacity.copy(),
        dominant_amount(ps_needs, capacity),
        dominant_amount(worker_needs, capacity),
        skip_misfits,
    )
    return Tasks(ps, workers)


def dominant_amount(needs: FloatArray, capacity: FloatArray) -> FloatArray:
    """The amount that one task of each job takes of its dominant resource."""
    dominant = np.argmax(needs / capacity, axis=1)
    amount: FloatArray = needs[np.arange(len(needs)), dominant]
    if (amount <= 0).any():
        raise ShoalError("a task must need something of some resource")
    return amount


def sync_speed(theta: FloatArray, batch: FloatArray, max_ps: int, max_workers: int) -> FloatArray:
    """[job, p-1, w-1]: 1 / (θ0 M/w + θ1 + θ2 w/p + θ3 w + θ4 p), the speed model of synchronous training."""
    p = np.arange(1, max_ps + 1)[None, :, None]
    w = np.arange(1, max_workers + 1)[None, None, :]
    t = np.asarray(theta, np.float64)[:, :, None, None]
    m = np.asarray(batch, np.float64)[:, None, None]
    seconds: FloatArray = t[:, 0] * m / w + t[:, 1] + t[:, 2] * w / p + t[:, 3] * w + t[:, 4] * p
    return np.asarray(1.0 / seconds)


@kernel
def _best_task(
    left: float, speed: FloatArray, p: int, w: int, ps_amount: float, worker_amount: float
) -> tuple[float, bool]:
    """(gain, whether it is a server) of the task with the largest gain for a job with p servers and w workers."""
    here = left / speed[p - 1, w - 1]
    gain_ps = gain_worker = -np.inf
    if p < speed.shape[0] and speed[p, w - 1] > 0:
        gain_ps = (here - left / speed[p, w - 1]) / ps_amount
    if w < speed.shape[1] and speed[p - 1, w] > 0:
        gain_worker = (here - left / speed[p - 1, w]) / worker_amount
    return max(gain_ps, gain_worker), gain_ps >= gain_worker


@kernel
def _fits(free: FloatArray, need: FloatArray) -> bool:
    fits = True
    for r in range(len(free)):
        fits &= need[r] <= free[r] + _ROUNDING
    return fits


@kernel
def _allocate(
    left: FloatArray,
    speed: FloatArray,
    least: IntArray,
    ps_needs: FloatArray,
    worker_needs: FloatArray,
    free: FloatArray,
    ps_amount: FloatArray,
    worker_amount: FloatArray,
    skip_misfits: bool,
) -> tuple[IntArray, IntArray]:
    jobs = len(left)
    ps, workers = np.zeros(jobs, np.int32), np.zeros(jobs, np.int32)
    queue = [(0.0, 0) for _ in range(0)]
    for job in range(jobs):
        first = ps_needs[job] + least[job] * worker_needs[job]
        if speed[job, 0, least[job] - 1] > 0 and _fits(free, first):
            free -= first
            ps[job], workers[job] = 1, least[job]
            gain, _ = _best_task(
                left[job], speed[job], ps[job], workers[job], ps_amount[job], worker_amount[job]
            )
            heappush(queue, (-gain, job))
    while len(queue) > 0:
        worth, job = heappop(queue)
        if worth >= 0:
            break
        _, is_ps = _best_task(
            left[job], speed[job], ps[job], workers[job], ps_amount[job], worker_amount[job]
        )
        need = ps_needs[job] if is_ps else worker_needs[job]
        if not _fits(free, need):
            if skip_misfits:
                continue
            break
        free -= need
        if is_ps:
            ps[job] += 1
        else:
            workers[job] += 1
        gain, _ = _best_task(left[job], speed[job], ps[job], workers[job], ps_amount[job], worker_amount[job])
        heappush(queue, (-gain, job))
    return ps, workers
