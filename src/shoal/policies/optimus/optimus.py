"""Optimus: each GPU goes where it saves the most time."""

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
from shoal.policies.gpu_types import give_types, reference_curves
from shoal.policies.optimus.parameter_servers import Tasks, allocate


@inlined
def _time_lost(remaining: float, speeds: FloatArray, at: int, gpus: int, cap: int) -> float:
    """L(n+1) - L(n), the negative of what one more GPU saves; 0 at the cap, where there is none to get."""
    if gpus >= cap:
        return 0.0
    return float(remaining / speeds[at + gpus + 1] - remaining / speeds[at + gpus])


@kernel
def optimus_shares(
    remaining: FloatArray,
    speeds: FloatArray,
    at: IntArray,
    min_gpus: IntArray,
    max_gpus: IntArray,
    gpus: int,
) -> IntArray:
    """Give each job its minimum in row order, then each GPU to argmax L(n) - L(n+1), the first of equals."""
    share = np.zeros(len(remaining), np.int32)
    heap = [(0.0, 0) for _ in range(0)]
    for j in range(len(remaining)):
        if min_gpus[j] <= gpus:
            share[j] = min_gpus[j]
            gpus -= min_gpus[j]
            heap.append((_time_lost(remaining[j], speeds, at[j], share[j], max_gpus[j]), j))
    heapq.heapify(heap)
    while gpus > 0 and len(heap) > 0 and heap[0][0] < 0:
        j = heap[0][1]
        share[j] += 1
        gpus -= 1
        heapq.heapreplace(heap, (_time_lost(remaining[j], speeds, at[j], share[j], max_gpus[j]), j))
    return share


def _none_for_unknown(remaining: FloatArray) -> FloatArray:
    """A job of unknown length keeps its first share: the gain of a further GPU is unknown."""
    return np.nan_to_num(remaining, nan=0.0)


@dataclass(frozen=True)
class OptimusOptions:
    #: Parameter servers that the cluster has room for, per GPU. They run on CPUs.
    servers_per_gpu: float = 1.0
    #: A parameter-server job is young until this fraction of its work is done. Its predictions are not reliable yet ...
    young_progress: float = 0.05
    #: ... so its gains are multiplied by this factor, as in the paper.
    young_factor: float = 0.95

    def __post_init__(self) -> None:
        if not self.servers_per_gpu > 0:
            raise ShoalError(
                f"option servers_per_gpu={self.servers_per_gpu} of policy 'optimus' must be above 0"
            )
        if not 0 < self.young_factor <= 1:
            raise ShoalError(f"option young_factor={self.young_factor} of policy 'optimus' must be in (0, 1]")


class Optimus(CountPolicy):
    """Marginal gain (Peng et al., EuroSys'18): each GPU goes where it saves the most remaining time.

    Every job starts with its minimum, in order of arrival. Then each GPU goes to the job with the largest
    L_j(n) - L_j(n+1), until no GPU saves time. If parameter-server jobs with a known speed f(p, w) are active,
    servers and workers compete. The next task is the one with the largest gain per unit of its dominant resource,

        (Q/f(p, w) - Q/f(p, w+1)) / O_w   or   (Q/f(p, w) - Q/f(p+1, w)) / O_p,

    see `parameter_servers`. A worker takes a GPU. A server takes a place on the CPUs.
    """

    name = "optimus"
    uses_speeds = True
    summary = "each GPU where it saves most remaining time; lengths known (EuroSys'18)"
    needs_lengths = True
    Options = OptimusOptions

    def shares(self, view: View, gpus: int, now_s: float) -> IntArray:
        left, (at, most) = view.remaining_now(now_s), reference_curves(view)
        if np.isnan(left).any():
            left = _none_for_unknown(left)
        return optimus_shares(left, view.speeds, at, view.min_gpus, most, gpus)

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
        # A job that got its workers from idle GPUs only, in `give_types`, has one server.
        servers = np.where(gpus > 0, np.maximum(servers, view.is_ps), 0).astype(np.int32)
        return Decision(gpus, gpu_type, servers=servers, codes=codes)

    def _tasks(self, view: View, gpus: int, now_s: float) -> Tasks:
        """Servers and workers of all jobs. The speed table of a job without servers has one row."""
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
        # [GPUs, places for servers]. A job without servers gets one that takes almost no place.
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
