"""Pre-scheduling: the next job prepares on a GPU whose job is about to end, on top of any policy (Liquid, TPDS 2021).

The policy decides who gets the GPU when it is free, as always. Before that, after each cycle of the scheduler,
the first waiting job that wants one GPU may be launched on a GPU whose job ends soon (`placement.preschedule`).
It prepares there without using the GPU. If the policy then gives it that GPU, it is already prepared. Otherwise
it is withdrawn, and only the preparation is lost.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from shoal.placement.placer import Unplaced
from shoal.placement.preschedule import PreRule, Running, find_ending_gpu
from shoal.scheduler.scheduler import Scheduler
from shoal.scheduler.sharing.single_gpu import (
    generation_of,
    has_one,
    waiting_for_one,
    waits_for_one,
    with_one,
)

#: A rule that holds from a point in time is evaluated this much later.
_JUST_AFTER_S = 1e-3


@dataclass(frozen=True, slots=True)
class Phases:
    """Seconds before a job's first use of its GPU, and after its last, as predicted."""

    pre_s: float
    post_s: float


#: The phases of a job (by id); None if they are unknown.
PhasesOf = Callable[[int], Phases | None]
#: Seconds that a job (by id) still uses its GPU; nan if unknown.
LeftOf = Callable[[int], float]
#: Whether a job (by id) can be launched on the GPU of a host now.
MayLaunch = Callable[[int, int], bool]


@dataclass(frozen=True, slots=True)
class PreSchedulingPlan:
    """Jobs to launch (job, host), jobs to withdraw, and when to decide again even if no event occurs."""

    launch: tuple[tuple[int, int], ...] = ()
    withdraw: tuple[int, ...] = ()
    wake_s: float = np.inf


class PreScheduling:
    """Which job prepares on which job's GPU. Changed only by `step`."""

    def __init__(
        self,
        scheduler: Scheduler,
        phases_of: PhasesOf,
        rule: PreRule | None = None,
        may_launch: MayLaunch | None = None,
        left_of: LeftOf | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.phases_of = phases_of
        self.rule = rule or PreRule()
        self.may_launch: MayLaunch = may_launch or (lambda job, host: True)
        self.left_of = left_of
        #: Job that prepares -> job whose GPU it waits for.
        self.beside: dict[int, int] = {}
        self._generation: dict[int, int] = {}

    def take_over(self, scheduler: Scheduler, beside: dict[int, int]) -> None:
        """Continue with these pre-scheduled jobs under another scheduler that has the same jobs."""
        self.scheduler = scheduler
        self.beside = {job: host for job, host in beside.items() if host in scheduler.view}
        self._generation = {job: generation_of(scheduler, host) for job, host in self.beside.items()}

    def step(self, now_s: float) -> PreSchedulingPlan:
        """After a cycle of the scheduler: which jobs are withdrawn, which are launched."""
        still = {job: host for job, host in self.beside.items() if waits_for_one(self.scheduler, job)}
        self.beside = {job: host for job, host in still.items() if self._is_there(job, host)}
        withdraw = tuple(sorted(still.keys() - self.beside.keys()))
        launch, wake_s = self._launch(now_s)
        return PreSchedulingPlan(launch, withdraw, wake_s)

    def _is_there(self, job: int, host: int) -> bool:
        """Whether the host is still on the GPU beside which the job prepares."""
        return has_one(self.scheduler, host) and generation_of(self.scheduler, host) == self._generation[job]

    def _launch(self, now_s: float) -> tuple[tuple[tuple[int, int], ...], float]:
        view, supply = self.scheduler.view, self.scheduler.supply
        waiting = [job for job in waiting_for_one(self.scheduler) if job not in self.beside]
        busy = int(view.gpus.sum())
        if not waiting or busy < supply.total_gpus or busy < self.rule.busy_from * supply.total_gpus:
            return (), np.inf
        left_s = self._left_s(with_one(self.scheduler), now_s)
        hosts = np.array([host for host, s in left_s.items() if not np.isnan(s)], np.int64)
        left = np.array([left_s[host] for host in hosts.tolist()])
        types = np.array([int(view.gpu_type[view.row(host)]) for host in hosts.tolist()], np.int64)
        taken = set(self.beside.values())
        free = np.array([host not in taken for host in hosts.tolist()], np.bool_)
        launched: list[tuple[int, int]] = []
        soonest = left.min(initial=np.inf)
        wakes_s: dict[float, float] = {}
        for job in waiting:
            phases = self.phases_of(job)
            if phases is None:
                continue
            within_s = phases.pre_s + self.rule.extra_s
            if soonest < within_s:  # most wait for jobs that end much later
                able = free & (left < within_s) & (view.type_max[types, view.row(job)] > 0)
                ready = [host for host in hosts[able].tolist() if self.may_launch(job, host)]
                found = self._launch_beside(job, phases, ready, left_s, now_s)
                if found is not None:
                    free[hosts == found] = False
                    launched.append((job, found))
                    continue
                if ready:  # refused by no more than rounding
                    wakes_s[-1.0] = now_s + _JUST_AFTER_S
            if within_s not in wakes_s:
                later = left[free & (left >= within_s)].min(initial=np.inf)
                wakes_s[within_s] = now_s + later - within_s + _JUST_AFTER_S
        return tuple(launched), min(wakes_s.values(), default=np.inf)

    def _launch_beside(
        self, job: int, phases: Phases, hosts: list[int], left_s: dict[int, float], now_s: float
    ) -> int | None:
        """The first of these hosts beside which the rule lets the job prepare."""
        running = [self._running(host, left_s[host], now_s) for host in hosts]
        found = find_ending_gpu(running, phases.pre_s, 1, self.rule)
        if isinstance(found, Unplaced):
            return None
        self.beside[job] = hosts[found]
        self._generation[job] = generation_of(self.scheduler, hosts[found])
        return hosts[found]

    def _left_s(self, hosts: list[int], now_s: float) -> dict[int, float]:
        """Seconds that each job still uses its GPU, as predicted; nan where its speed is not known."""
        if self.left_of is not None:
            known_of = [host for host in hosts if self.phases_of(host) is not None]
            return dict.fromkeys(hosts, np.nan) | {host: self.left_of(host) for host in known_of}
        view = self.scheduler.view
        left = view.remaining_now(now_s)
        out = {}
        for host in hosts:
            row = view.row(host)
            rate = float(view.rate[row])
            known = rate > 0 and self.phases_of(host) is not None
            begins_s = max(float(view.settled_s[row]) - now_s, 0.0)  # it pauses between two shares
            out[host] = begins_s + float(left[row]) / rate if known else np.nan
        return out

    def _running(self, host: int, left_s: float, now_s: float) -> Running:
        view, phases = self.scheduler.view, self.phases_of(host)
        elapsed_s = now_s - float(view.last_start_s[view.row(host)])
        post_s = phases.post_s if phases is not None else np.nan
        return Running(elapsed_s, elapsed_s + left_s + post_s, post_s)
