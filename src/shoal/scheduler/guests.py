"""Jobs that run on a GPU of another: Liquid's sharing on top of any policy (TPDS'21).

The policy shares out whole GPUs and knows nothing of guests: to it a guest is a job that waits, and it gets a
GPU of its own as soon as it is its turn. After each of the scheduler's cycles, jobs that wait and want one GPU
may join a job that has one GPU, where memory and predicted utilisation allow (`placement.sharing`). So what
holds for the scheduler holds with guests too, and a guest can never cost a job its share.

A guest leaves when its host ends, moves or changes size, and when it gets a share of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from shoal.placement.base import Unplaced
from shoal.placement.sharing import GpuUse, SharingRule, find_shared_gpu
from shoal.scheduler.one_gpu import has_one, waiting_for_one, waits, with_one
from shoal.scheduler.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class Need:
    """What a job of one worker takes of its GPU, as predicted: memory, and utilisation (0..1)."""

    memory_mb: float
    utilisation: float


#: What a job (by id) needs of a GPU; None where nothing is known of it.
NeedOf = Callable[[int], Need | None]


@dataclass(frozen=True, slots=True)
class GuestPlan:
    """What changes after a cycle: guests that leave, and guests that join (job, host)."""

    leave: tuple[int, ...] = ()
    join: tuple[tuple[int, int], ...] = ()


class Guests:
    """Who runs on whose GPU. Changed only by `step`."""

    def __init__(
        self, scheduler: Scheduler, need_of: NeedOf, memory_mb: float, rule: SharingRule | None = None
    ) -> None:
        self.scheduler = scheduler
        self.need_of = need_of
        self.memory_mb = memory_mb
        self.rule = rule or SharingRule()
        #: Guest -> host, by job id.
        self.host_of: dict[int, int] = {}
        self._generation: dict[int, int] = {}

    def guests_of(self, host: int) -> list[int]:
        return [guest for guest, its in self.host_of.items() if its == host]

    def step(self) -> GuestPlan:
        """After a cycle of the scheduler: who leaves, then who joins."""
        leave = [guest for guest, host in self.host_of.items() if not self._may_stay(guest, host)]
        for guest in leave:
            del self.host_of[guest], self._generation[guest]
        return GuestPlan(tuple(leave), tuple(self._join()))

    def _may_stay(self, guest: int, host: int) -> bool:
        if not waits(self.scheduler, guest) or not has_one(self.scheduler, host):
            return False
        return self._generation_of(host) == self._generation[guest]

    def _generation_of(self, job: int) -> int:
        return int(self.scheduler.view.generation[self.scheduler.view.row(job)])

    def _join(self) -> list[tuple[int, int]]:
        view = self.scheduler.view
        waiting = [
            job
            for job in waiting_for_one(self.scheduler)
            if job not in self.host_of and self.need_of(job) is not None
        ]
        if not waiting:
            return []
        hosts = self._hosts()
        uses = [self._use(host) for host in hosts]
        # GPUs of larger jobs are in use and no one may join; the rest is vacant.
        others = int(view.gpus.sum()) - len(hosts)
        vacant = self.scheduler.supply.total_gpus - len(hosts) - others
        shut = GpuUse(self.memory_mb, self.memory_mb, (np.inf,))
        free = [GpuUse(self.memory_mb)] * max(vacant, 0)
        joined = []
        for guest in waiting:
            need = self.need_of(guest)
            assert need is not None
            allowed = view.type_max[:, view.row(guest)] > 0
            own = [use if allowed[self._type_of(host)] else shut for host, use in zip(hosts, uses)]
            gpus = [*own, *[shut] * others, *free]
            found = find_shared_gpu(gpus, need.memory_mb, need.utilisation, 1, self.rule)
            if isinstance(found, Unplaced):
                continue
            host = hosts[found]
            self.host_of[guest] = host
            self._generation[guest] = self._generation_of(host)
            uses[found] = self._use(host)
            joined.append((guest, host))
        return joined

    def _hosts(self) -> list[int]:
        """Jobs that have one GPU and of which it is known what they take of it, in order of submission."""
        return [job for job in with_one(self.scheduler) if self.need_of(job) is not None]

    def _use(self, host: int) -> GpuUse:
        needs = [self.need_of(job) for job in (host, *self.guests_of(host))]
        known = [need for need in needs if need is not None]
        allocated = sum(need.memory_mb for need in known)
        return GpuUse(self.memory_mb, allocated, tuple(need.utilisation for need in known))

    def _type_of(self, host: int) -> int:
        return int(self.scheduler.view.gpu_type[self.scheduler.view.row(host)])
