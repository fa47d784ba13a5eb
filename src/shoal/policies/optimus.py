"""Optimus: the GPU goes where it shortens a job most."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from shoal.core.arrays import FloatArray, IntArray
from shoal.core.compiled import inlined, kernel
from shoal.core.decision import Decision
from shoal.core.errors import ShoalError
from shoal.core.supply import Supply
from shoal.core.view import View
from shoal.policies.afs.afs_l import marginal_evidence
from shoal.policies.base import CountPolicy
from shoal.policies.optimus_ps import Tasks, allocate
from shoal.policies.types import give_types, reference_curves

#: So many GPUs are handed out one by one at the end.
_LAST_FEW = 32


@inlined
def _loss(remaining: float, speeds: FloatArray, at: int, gpus: int, limit: int) -> float:
    """L(n+1) - L(n): below 0 as far as one GPU more saves time; 0 where it does not or cannot be had."""
    if gpus >= limit:
        return 0.0
    return min(remaining / speeds[at + gpus + 1] - remaining / speeds[at + gpus], 0.0)


@kernel
def _grant_below(
    level: float,
    gpus: int,
    share: IntArray,
    loss: FloatArray,
    remaining: FloatArray,
    speeds: FloatArray,
    at: IntArray,
    limit: IntArray,
) -> int:
    """Grant all GPUs whose loss is below `level`; what is left of `gpus`, or -1 if they are not enough."""
    for j in range(len(share)):
        while loss[j] < level:
            if gpus == 0:
                return -1
            share[j] += 1
            gpus -= 1
            loss[j] = _loss(remaining[j], speeds, at[j], share[j], limit[j])
    return gpus


@inlined
def _next_level(low: float, high: float, granted: bool, step: float) -> float:
    """Between a level whose GPUs were granted and one for which they do not last; until both are known, a step on."""
    if high == np.inf:
        return low / step if step < 1e6 else 0.0
    if high == 0:
        return low / 8
    between = -np.sqrt(-low) * np.sqrt(-high)  # the product of small numbers might vanish
    return between if granted else max(between, high * step)


@kernel
def optimus_shares(
    remaining: FloatArray,
    speeds: FloatArray,
    at: IntArray,
    min_gpus: IntArray,
    max_gpus: IntArray,
    gpus: int,
    guess: float,
) -> tuple[IntArray, float]:
    """One GPU at a time to argmax L_j(n) - L_j(n+1), the first of equals; a heap holds the gains.

    L(0) is infinite, so every job gets its minimum first, in order of submission. As long as anyone gains
    more than some level nobody gets a GPU for less, so those above a level that are no more than there are
    GPUs can be granted at once, in any order; only the last few go through the heap. The level is searched
    from a guess on, in steps that grow, and returned for the next time; shares do not depend on it.
    """
    n = len(remaining)
    share, loss = np.zeros(n, np.int32), np.zeros(n)
    for j in range(n):
        if min_gpus[j] <= gpus:
            share[j] = min_gpus[j]
            gpus -= min_gpus[j]
            loss[j] = _loss(remaining[j], speeds, at[j], share[j], max_gpus[j])
    if n == 0 or gpus == 0:
        return share, guess
    # All above the gain `-low` is granted; the GPUs do not last for all above `-high`.
    low, high, level, step = 0.0, np.inf, min(guess, 0.0), 1.1
    for j in range(n):
        low = min(low, loss[j])
    granted = False
    while gpus > _LAST_FEW and low < level * 1.02:
        tried, tried_loss = share.copy(), loss.copy()
        left = _grant_below(level, gpus, tried, tried_loss, remaining, speeds, at, max_gpus)
        if left < 0:
            high = level
        else:
            share, loss, gpus, low, granted = tried, tried_loss, left, level, True
        level = _next_level(low, high, granted, step)
        step *= step
    heap = [(loss[j], j) for j in range(n) if loss[j] < 0]
    heapq.heapify(heap)
    while gpus > 0 and len(heap) > 0:
        j = heap[0][1]
        share[j] += 1
        gpus -= 1
        loss[j] = _loss(remaining[j], speeds, at[j], share[j], max_gpus[j])
        if loss[j] < 0:
            heapq.heapreplace(heap, (loss[j], j))
        else:
            heapq.heappop(heap)
    return share, low if granted else min(high, 0.0)


def _none_for_unknown(remaining: FloatArray) -> FloatArray:
    """A job of unknown length keeps what it starts with, as more cannot be weighed."""
    return np.nan_to_num(remaining, nan=0.0)


@dataclass(frozen=True)
class OptimusOptions:
    #: Parameter servers that the cluster has room for, per GPU: they live on CPUs.
    servers_per_gpu: float = 1.0
    #: Until this part of a job's work is done its predictions are young, and its gains count less ...
    young_progress: float = 0.05
    #: ... by this factor. Only for parameter-server jobs, as in the paper.
    young_factor: float = 0.95

    def __post_init__(self) -> None:
        if not self.servers_per_gpu > 0:
            raise ShoalError(
                f"option servers_per_gpu={self.servers_per_gpu} of policy 'optimus' must be above 0"
            )
        if not 0 < self.young_factor <= 1:
            raise ShoalError(f"option young_factor={self.young_factor} of policy 'optimus' must be in (0, 1]")


class Optimus(CountPolicy):
    """Marginal gain (Peng et al., EuroSys'18): each GPU where it saves most remaining time.

    Every job starts with its minimum, in order of arrival; then each GPU goes to the job with the largest
    L_j(n) - L_j(n+1), until none saves any time. Where parameter-server jobs are active whose speed f(p, w)
    is known, servers and workers compete: the next task is the one with the largest gain per unit of its
    dominant resource,

        (Q/f(p, w) - Q/f(p, w+1)) / O_w   or   (Q/f(p, w) - Q/f(p+1, w)) / O_p,

    gains of young jobs damped (see `optimus_ps`). A worker takes a GPU, a server a place on the CPUs.
    """

    name = "optimus"
    summary = "each GPU where it saves most remaining time; lengths known (EuroSys'18)"
    needs_lengths = True
    Options = OptimusOptions
    #: Where the search for the last gain begins: at that of the last decision.
    _level = 0.0

    def shares(self, view: View, gpus: int, now_s: float) -> IntArray:
        left, (at, most) = view.remaining_now(now_s), reference_curves(view)
        if np.isnan(left).any():
            left = _none_for_unknown(left)
        shares, self._level = optimus_shares(left, view.speeds, at, view.min_gpus, most, gpus, self._level)
        return shares

    def decide(self, view: View, supply: Supply, now_s: float) -> Decision:
        if not view.by_servers or supply.total_gpus == 0:
            return super().decide(view, supply, now_s)
        tasks = self._tasks(view, supply.total_gpus, now_s)
        servers = np.where(view.is_ps > 0, tasks.ps, 0).astype(np.int32)
        if len(supply.gpus_of_type) == 1:
            return Decision(tasks.workers, servers=servers)
        gpus, gpu_type, codes = give_types(
            view, tasks.workers, supply.gpus_of_type, self.wish_gpus(view), resize=True
        )
        # Who got workers only by what its numbers left idle has one server.
        servers = np.where(gpus > 0, np.maximum(servers, view.is_ps), 0).astype(np.int32)
        return Decision(gpus, gpu_type, servers=servers, codes=codes)

    def _tasks(self, view: View, gpus: int, now_s: float) -> Tasks:
        """Servers and workers of all jobs; jobs without servers are those whose speed has one row."""
        at, most = reference_curves(view)
        tables = []
        for row, job_id in enumerate(view.job_ids.tolist()):
            known = view.by_servers.get(job_id)
            if known is None:
                tables.append(view.speeds[at[row] + 1 : at[row] + 1 + most[row]][None, :])
            else:
                tables.append(known[:, : view.max_gpus[row]])
        speed = np.zeros((len(view), max(t.shape[0] for t in tables), max(t.shape[1] for t in tables)))
        for row, table in enumerate(tables):
            speed[row, : table.shape[0], : table.shape[1]] = table
        has_servers = np.array([i in view.by_servers for i in view.job_ids.tolist()])
        # [GPUs, places for servers]; a job without servers takes one that costs next to nothing.
        worker = np.tile([1.0, 0.0], (len(view), 1))
        server = np.where(has_servers[:, None], [0.0, 1.0], [0.0, 1e-9])
        left = _none_for_unknown(view.remaining_now(now_s))
        young = left > (1 - self.options.young_progress) * view.total
        return allocate(
            left,
            speed,
            server,
            worker,
            np.array([gpus, max(gpus * self.options.servers_per_gpu, 1.0)]),
            least_workers=view.min_gpus,
            young=young & has_servers,
            young_factor=self.options.young_factor,
            skip_misfits=True,
        )

    def evidence(self, view: View, row: int, now_s: float) -> dict[str, float | int | str]:
        return marginal_evidence(view, row, view.remaining_now(now_s))
