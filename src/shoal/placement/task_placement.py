"""Placement of the tasks of parameter-server jobs: that of Optimus (EuroSys'18), and two baselines.

Principle: a synchronous job with p servers and w workers on equal nodes is fastest on the smallest number k
of nodes that all host the same number of servers and the same number of workers. Every server then has the
smallest number of remote workers, w - w/k, and all servers have the same number.

    jobs in increasing p + w; nodes by free resources, most first
    for k = 1, 2, ...: assign server i and worker i to node i mod k of the k freest nodes; stop when all fit
    if no k fits: assign servers and workers alternately to the first node that holds them until none fits;
    with at least one of each the job runs with fewer tasks, otherwise it waits

k is at most max(p, w): with more nodes, one would stay empty.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heapify, heappop, heappush

import numpy as np
from numpy.typing import NDArray

from shoal.core.compiled import kernel
from shoal.core.errors import ShoalError
from shoal.placement.validate import whole

IntArray = NDArray[np.int32]
FloatArray = NDArray[np.float64]

_ROUNDING = 1e-9
#: Maximum number of tasks in one call.
MOST_TASKS = 10**8


@dataclass(frozen=True, eq=False)
class TaskPlacement:
    """Tasks by job and node: row i puts `ps[i]` servers and `workers[i]` workers on `node[i]`."""

    job: IntArray
    node: IntArray
    ps: IntArray
    workers: IntArray
    #: By job: the number of tasks placed, at most the number requested.
    placed_ps: IntArray
    placed_workers: IntArray

    def of(self, job: int) -> list[tuple[int, int, int]]:
        """(node, servers, workers) of one job, by node."""
        rows = np.flatnonzero(self.job == job)
        return sorted(zip(self.node[rows].tolist(), self.ps[rows].tolist(), self.workers[rows].tolist()))


def place(
    free: FloatArray,
    ps: IntArray,
    workers: IntArray,
    ps_needs: FloatArray,
    worker_needs: FloatArray,
    *,
    rule: str = "optimus",
    order_by: int = 0,
) -> TaskPlacement:
    """Place all jobs. `free` is indexed [node, resource], the needs of one task [job, resource].

    rule: "optimus"; "least-loaded": each task goes to the freest node; "round-robin": each task goes to
    the next node. `order_by` is the resource that decides which node is freest.
    """
    free = np.ascontiguousarray(free, np.float64).copy()
    ps_needs = np.ascontiguousarray(ps_needs, np.float64)
    worker_needs = np.ascontiguousarray(worker_needs, np.float64)
    _check(free, np.asarray(ps), np.asarray(workers), ps_needs, worker_needs)
    whole("the resource to order nodes by", order_by, 0, free.shape[1] - 1)
    ps, workers = np.asarray(ps, np.int32), np.asarray(workers, np.int32)
    jobs = np.argsort(ps + workers, kind="stable").astype(np.int32)
    if rule == "optimus":
        rows = _optimus(free, jobs, ps, workers, ps_needs, worker_needs, order_by)
    elif rule in ("least-loaded", "round-robin"):
        rows = _one_by_one(free, jobs, ps, workers, ps_needs, worker_needs, order_by, rule == "round-robin")
    else:
        raise ShoalError(f"no rule {rule!r}; known: optimus, least-loaded, round-robin")
    placed_ps = np.bincount(rows[:, 0], weights=rows[:, 2], minlength=len(ps)).astype(np.int32)
    placed_workers = np.bincount(rows[:, 0], weights=rows[:, 3], minlength=len(ps)).astype(np.int32)
    return TaskPlacement(rows[:, 0], rows[:, 1], rows[:, 2], rows[:, 3], placed_ps, placed_workers)


def _check(
    free: FloatArray, ps: IntArray, workers: IntArray, ps_needs: FloatArray, worker_needs: FloatArray
) -> None:
    if free.ndim != 2 or ps.ndim != 1 or workers.ndim != 1:
        raise ShoalError("free resources need one row per node, and servers and workers one number per job")
    jobs, resources = len(ps), free.shape[1]
    if ps_needs.shape != (jobs, resources) or worker_needs.shape != (jobs, resources):
        raise ShoalError(f"needs must be given for {jobs} jobs and {resources} resources")
    if len(workers) != jobs or not ((ps >= 1) & (workers >= 1)).all():
        raise ShoalError("each job needs at least one parameter server and one worker")
    tasks = np.concatenate([ps, workers]).astype(np.float64)
    if (tasks != np.floor(tasks)).any() or tasks.sum() > MOST_TASKS:
        raise ShoalError(f"servers and workers must be whole numbers, {MOST_TASKS} in all at most")
    if not (np.isfinite(free).all() and np.isfinite(ps_needs).all() and np.isfinite(worker_needs).all()):
        raise ShoalError("free resources and needs must be finite numbers")
    if (ps_needs < 0).any() or (worker_needs < 0).any():
        raise ShoalError("the needs of a task must not be negative")


@kernel
def _fits(free: FloatArray, ps: int, workers: int, ps_need: FloatArray, worker_need: FloatArray) -> bool:
    fits = True
    for r in range(len(free)):
        fits &= ps * ps_need[r] + workers * worker_need[r] <= free[r] + _ROUNDING
    return fits


@kernel
def _take(free: FloatArray, ps: int, workers: int, ps_need: FloatArray, worker_need: FloatArray) -> None:
    for r in range(len(free)):
        free[r] -= ps * ps_need[r] + workers * worker_need[r]


@kernel
def _dealt(tasks: int, k: int, i: int) -> int:
    """How many of `tasks` node i gets if they are assigned to k nodes in turn."""
    return tasks // k + (1 if i < tasks % k else 0)


@kernel
def _optimus(
    free: FloatArray,
    jobs: IntArray,
    ps: IntArray,
    workers: IntArray,
    ps_needs: FloatArray,
    worker_needs: FloatArray,
    order_by: int,
) -> IntArray:
    rows = np.empty((int((ps + workers).sum()), 4), np.int32)
    n = np.int64(0)  # a literal would make numba compile the callees a second time
    nodes = [(float(-free[m, order_by]), m) for m in range(len(free))]
    heapify(nodes)
    chosen = np.empty(len(free), np.int64)
    for job in jobs:
        p, w = ps[job], workers[job]
        ps_need, worker_need = ps_needs[job], worker_needs[job]
        k, fits = 0, False
        while not fits and k < min(max(p, w), len(free)):
            chosen[k] = heappop(nodes)[1]
            k += 1
            fits = True
            for i in range(k):
                if not _fits(free[chosen[i]], _dealt(p, k, i), _dealt(w, k, i), ps_need, worker_need):
                    fits = False
                    break
        if fits:
            for i in range(k):
                here_ps, here_workers = _dealt(p, k, i), _dealt(w, k, i)
                _take(free[chosen[i]], here_ps, here_workers, ps_need, worker_need)
                rows[n, 0], rows[n, 1] = job, chosen[i]
                rows[n, 2], rows[n, 3] = here_ps, here_workers
                n += 1
        for i in range(k):
            heappush(nodes, (float(-free[chosen[i], order_by]), int(chosen[i])))
        if not fits:
            before = n
            n = np.int64(_first_fit(free, rows, n, job, p, w, ps_need, worker_need))
            if n > before:  # first fit changed the keys of nodes inside the heap
                nodes = [(float(-free[m, order_by]), m) for m in range(len(free))]
                heapify(nodes)
    return rows[:n]


@kernel
def _first_fit(
    free: FloatArray,
    rows: IntArray,
    n: int,
    job: int,
    p: int,
    w: int,
    ps_need: FloatArray,
    worker_need: FloatArray,
) -> int:
    """Assign servers and workers alternately to the first node that holds them; undo it without one of each.

    All tasks of one kind are equal, so a node without room for one has none for the next: two pointers suffice.
    """
    start, ps_at, worker_at = n, 0, 0
    none, one = np.int64(0), np.int64(1)
    placed_ps = placed_workers = 0
    nodes = len(free)
    for turn in range(2 * max(p, w)):
        is_ps = turn % 2 == 0
        if is_ps:
            if placed_ps == p:
                continue
            while ps_at < nodes and not _fits(free[ps_at], one, none, ps_need, worker_need):
                ps_at += 1
            node = ps_at
        else:
            if placed_workers == w:
                continue
            while worker_at < nodes and not _fits(free[worker_at], none, one, ps_need, worker_need):
                worker_at += 1
            node = worker_at
        if node == nodes:
            break
        _take(free[node], one if is_ps else none, none if is_ps else one, ps_need, worker_need)
        placed_ps += is_ps
        placed_workers += not is_ps
        row = n
        for candidate in range(start, n):
            if rows[candidate, 1] == node:
                row = candidate
        if row == n:
            rows[n, 0], rows[n, 1], rows[n, 2], rows[n, 3] = job, node, 0, 0
            n += 1
        rows[row, 2 if is_ps else 3] += 1
    if placed_ps == 0 or placed_workers == 0:
        for row in range(start, n):
            _take(free[rows[row, 1]], -rows[row, 2], -rows[row, 3], ps_need, worker_need)
        return start
    return n


@kernel
def _one_by_one(
    free: FloatArray,
    jobs: IntArray,
    ps: IntArray,
    workers: IntArray,
    ps_needs: FloatArray,
    worker_needs: FloatArray,
    order_by: int,
    circular: bool,
) -> IntArray:
    """Assign each task by itself, servers and workers alternately; a job that does not fit as a whole waits."""
    rows = np.empty((int((ps + workers).sum()), 4), np.int32)
    n, following, nodes = 0, 0, len(free)
    for job in jobs:
        start, before = n, following
        placed_ps = placed_workers = 0
        while placed_ps + placed_workers < ps[job] + workers[job]:
            is_ps = placed_ps < ps[job] and (placed_ps <= placed_workers or placed_workers == workers[job])
            one_ps, one_worker = (1, 0) if is_ps else (0, 1)
            best = -1
            for step in range(nodes):
                node = (following + step) % nodes if circular else step
                if not _fits(free[node], one_ps, one_worker, ps_needs[job], worker_needs[job]):
                    continue
                if circular:
                    best = node
                    break
                if best < 0 or free[node, order_by] > free[best, order_by]:
                    best = node
            if best < 0:
                break
            following = (best + 1) % nodes
            _take(free[best], one_ps, one_worker, ps_needs[job], worker_needs[job])
            rows[n, 0], rows[n, 1], rows[n, 2], rows[n, 3] = job, best, one_ps, one_worker
            n += 1
            placed_ps += one_ps
            placed_workers += one_worker
        if placed_ps + placed_workers < ps[job] + workers[job]:
            for row in range(start, n):
                _take(free[rows[row, 1]], -rows[row, 2], -rows[row, 3], ps_needs[job], worker_needs[job])
            n, following = start, before
    return rows[:n]
