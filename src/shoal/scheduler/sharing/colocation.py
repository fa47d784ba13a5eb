"""Co-location: jobs that run on the GPU of another job, on top of any policy (Liquid, TPDS 2021).

The policy allocates whole GPUs and does not know about co-location: to it, a co-located job waits, and it gets
a GPU of its own when it is its turn. After each cycle of the scheduler, waiting jobs that want one GPU may join
a job that has one GPU, if memory and predicted utilisation allow it (`placement.sharing`). Co-location
therefore never costs another job its share, and all rules of the scheduler still hold.

A co-located job leaves when its host ends, moves or changes size, and when it gets a share of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np

from shoal.placement.placer import Unplaced
from shoal.placement.sharing import GpuUse, SharingRule, find_shared_gpu
from shoal.scheduler.scheduler import Scheduler
from shoal.scheduler.sharing.single_gpu import (
    generation_of,
    has_one,
    waiting_for_one,
    waits_for_one,
    with_one,
)


@dataclass(frozen=True, slots=True)
class Need:
    """What a job of one worker takes of its GPU, as predicted: memory, and utilisation (0..1)."""

    memory_mb: float
    utilisation: float


#: What a job (by id) needs of a GPU; None if unknown.
NeedOf = Callable[[int], Need | None]
#: The memory of the GPU that a job (by id) has.
MemoryOf = Callable[[int], float]
#: Whether a job (by id) can be put on the GPU of a host now.
MayJoin = Callable[[int, int], bool]


@dataclass(frozen=True, slots=True)
class ColocationPlan:
    """The changes after a cycle: jobs that leave their host, and jobs that join one (job, host)."""

    leave: tuple[int, ...] = ()
    join: tuple[tuple[int, int], ...] = ()


class Colocation:
    """Which job runs on which job's GPU. Changed only by `step`."""

    def __init__(
        self,
        scheduler: Scheduler,
        need_of: NeedOf,
        memory_mb: float | MemoryOf,
        rule: SharingRule | None = None,
        may_join: MayJoin | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.need_of = need_of
        self.memory_of: MemoryOf = memory_mb if callable(memory_mb) else lambda host: memory_mb
        self.rule = rule or SharingRule()
        self.may_join: MayJoin = may_join or (lambda job, host: True)
        #: Co-located job -> host, by job id.
        self.host_of: dict[int, int] = {}
        self._generation: dict[int, int] = {}

    def take_over(self, scheduler: Scheduler, host_of: dict[int, int]) -> None:
        """Continue with these co-located jobs under another scheduler that has the same jobs."""
        self.scheduler = scheduler
        self.host_of = {job: host for job, host in host_of.items() if host in scheduler.view}
        self._generation = {job: generation_of(scheduler, host) for job, host in self.host_of.items()}

    def colocated_with(self, host: int) -> list[int]:
        return [job for job, its in self.host_of.items() if its == host]

    def step(self) -> ColocationPlan:
        """After a cycle of the scheduler: which jobs leave, then which join."""
        leave = [job for job, host in self.host_of.items() if not self._may_stay(job, host)]
        for job in leave:
            del self.host_of[job], self._generation[job]
        return ColocationPlan(tuple(leave), tuple(self._join()))

    def _may_stay(self, job: int, host: int) -> bool:
        if not waits_for_one(self.scheduler, job) or not has_one(self.scheduler, host):
            return False
        return generation_of(self.scheduler, host) == self._generation[job]

    def _join(self) -> list[tuple[int, int]]:
        waiting = [job for job in waiting_for_one(self.scheduler) if job not in self.host_of]
        hosts = self._hosts() if waiting else []
        view = self.scheduler.view
        if not hosts or view.gpus.sum() < self.rule.busy_from * self.scheduler.supply.total_gpus:
            return []
        uses = self._uses(hosts)
        rooms = np.array([_room(use, self.rule) for use in uses])
        types = np.array([self._type_of(host) for host in hosts])
        anywhere = replace(self.rule, busy_from=0.0)  # the load of the cluster is checked above
        joined = []
        nowhere: set[Need] = set()  # room only shrinks while jobs join
        for job in waiting:
            need = self.need_of(job)
            if need is None or need in nowhere:
                continue
            fits = (rooms > (need.memory_mb, need.utilisation)).all(axis=1)
            if not fits.any():
                nowhere.add(need)
                continue
            fits &= view.type_max[types, view.row(job)] > 0
            for at in np.flatnonzero(fits).tolist():
                host = hosts[at]
                if not self.may_join(job, host) or isinstance(
                    find_shared_gpu([uses[at]], need.memory_mb, need.utilisation, 1, anywhere), Unplaced
                ):
                    continue
                self.host_of[job] = host
                self._generation[job] = generation_of(self.scheduler, host)
                uses[at] = self._use(host, self.colocated_with(host))
                rooms[at] = _room(uses[at], self.rule)
                joined.append((job, host))
                break
        return joined

    def why_not(self, job: int) -> str | None:
        """Why a waiting job is not co-located, as a clause; None if it could be now."""
        if not waits_for_one(self.scheduler, job):
            return "only jobs with one GPU share"
        hosts = self._hosts()
        need = self.need_of(job) or Need(np.nan, np.nan)
        found = self._find(job, need, hosts, self._uses(hosts))
        return found.because if isinstance(found, Unplaced) else None

    def _find(self, job: int, need: Need, hosts: list[int], uses: list[GpuUse]) -> int | Unplaced:
        """The host that a job may join, by its place in `hosts`."""
        view = self.scheduler.view
        # No job may join the GPUs of larger jobs. The rest is vacant.
        others = int(view.gpus.sum()) - len(hosts)
        vacant = max(self.scheduler.supply.total_gpus - len(hosts) - others, 0)
        allowed = view.type_max[:, view.row(job)] > 0
        own = [
            use if allowed[self._type_of(host)] and self.may_join(job, host) else _SHUT
            for host, use in zip(hosts, uses)
        ]
        gpus = [*own, *[_SHUT] * others, *[_FREE] * vacant]
        return find_shared_gpu(gpus, need.memory_mb, need.utilisation, 1, self.rule)

    def _hosts(self) -> list[int]:
        """Jobs with one GPU whose needs are known, in order of submission."""
        return [job for job in with_one(self.scheduler) if self.need_of(job) is not None]

    def _uses(self, hosts: list[int]) -> list[GpuUse]:
        on_host: dict[int, list[int]] = {}
        for job, host in self.host_of.items():
            on_host.setdefault(host, []).append(job)
        return [self._use(host, on_host.get(host, ())) for host in hosts]

    def _use(self, host: int, on_host: Iterable[int]) -> GpuUse:
        known = [need for job in (host, *on_host) if (need := self.need_of(job)) is not None]
        allocated = sum(need.memory_mb for need in known)
        return GpuUse(self.memory_of(host), allocated, tuple(need.utilisation for need in known))

    def _type_of(self, host: int) -> int:
        return int(self.scheduler.view.gpu_type[self.scheduler.view.row(host)])


#: A GPU in use that no one may join, and one that no one uses.
_SHUT, _FREE = GpuUse(0.0, 0.0, (np.inf,)), GpuUse(0.0)


def _room(use: GpuUse, rule: SharingRule) -> tuple[float, float]:
    """Memory and utilisation that a GPU has to spare."""
    return use.memory_mb - use.allocated_mb, rule.max_utilisation - sum(use.utilisations)
