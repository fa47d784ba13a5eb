"""A simulation in which jobs that wait use GPUs of others: as guests, or by preparing early (Liquid, TPDS'21).

Jobs on one GPU go on at full speed while together they want no more than all of it; beyond that each is
slowed down alike, by the sum of their utilisations. A job first prepares for `pre_s`, and holds its GPU for
`post_s` after its work; a job that was launched early has prepared meanwhile, if it gets that very GPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shoal.core.events import Event
from shoal.core.plan import Reconfigure
from shoal.placement.preschedule import PreRule
from shoal.placement.sharing import SharingRule
from shoal.scheduler.early import EarlyStarts, Phases
from shoal.scheduler.guests import Guests, Need
from shoal.sim.engine import FINISH, Allocation, Simulation

GPU_MEMORY_MB = 16_384.0


@dataclass(frozen=True, slots=True)
class Use:
    """What one worker of a model does with its GPU."""

    need: Need
    phases: Phases = field(default_factory=lambda: Phases(0.0, 0.0))


class SharingSimulation(Simulation):
    """`uses` are by model; a model that is not named takes part in neither. Without a rule it is turned off."""

    def __init__(
        self,
        *args: Any,
        uses: Mapping[str, Use],
        share: SharingRule | None = None,
        early: PreRule | None = None,
        memory_mb: float = GPU_MEMORY_MB,
        **more: Any,
    ) -> None:
        super().__init__(*args, **more)
        self._use = [uses.get(job.model) for job in self.jobs]
        self._guests = Guests(self.scheduler, self._need, memory_mb, share) if share else None
        self._early = EarlyStarts(self.scheduler, self._phases, early) if early else None
        #: Guest -> host, as the virtual cluster has it; and since when jobs are guests or prepare early.
        self._hosting: dict[int, int] = {}
        self._since_guest: dict[int, float] = {}
        self._preparing: dict[int, tuple[int, float]] = {}
        self._figures = {"guests": 0, "guest_s": 0.0, "launched_early": 0, "prepared_early_s": 0.0}
        self.record.extra["sharing"] = self._figures

    def _need(self, j: int) -> Need | None:
        use = self._use[j]
        return use.need if use else None

    def _phases(self, j: int) -> Phases | None:
        """Of jobs that are alone on their GPU, or wait without being anyone's guest."""
        use = self._use[j]
        return None if use is None or self._shares(j) else use.phases

    # -- what the engine does, with guests beside --------------------------------------------------

    def _obey(self, command: Reconfigure, now: float) -> None:
        j, began_s = command.job, self.record.first_start_s[command.job]
        if j in self._hosting:
            self._part(j, now)
        super()._obey(command, now)
        if not np.isnan(began_s):  # as a guest it began before
            self.record.first_start_s[j] = began_s

    def _finish(self, j: int, now: float) -> None:
        if j in self._hosting:
            self._part(j, now)
        super()._finish(j, now)

    def _after(self, now: float) -> float:
        wake_s = super()._after(now)
        if self._guests:
            plan = self._guests.step()
            for guest in plan.leave:
                if guest in self._hosting:
                    self._part(guest, now)
                    self._log(guest, 0, now)
            for guest, host in plan.join:
                self._join(guest, host, now)
        if self._early:
            early = self._early.step(now)
            for job in early.withdraw:
                del self._preparing[job]
            for job, host in early.launch:
                self._preparing[job] = host, now
                self._figures["launched_early"] += 1
            wake_s = min(wake_s, early.wake_s)
        return wake_s

    def _reach(
        self, j: int, spot: Allocation, verb: str, pending: tuple[Allocation, float] | None, now: float
    ) -> None:
        host, since_s = self._preparing.pop(j, (-1, now))
        use = self._use[j]
        if verb != "start" or use is None or use.phases.pre_s == 0:
            super()._reach(j, spot, verb, pending, now)
            return
        there = host >= 0 and spot[1:3] == self._spot[host][1:3]
        prepared_s = min(now - since_s, use.phases.pre_s) if there else 0.0
        self._figures["prepared_early_s"] += prepared_s
        self._stand_still(j, spot, use.phases.pre_s - prepared_s, now)

    def _push(self, at_s: float, kind: int, j: int) -> None:
        use = self._use[j]
        super()._push(at_s + use.phases.post_s if kind == FINISH and use else at_s, kind, j)

    def _measure(self, j: int) -> list[Event]:
        """Who shares a GPU does not tell what it would do alone."""
        return [] if self._shares(j) else super()._measure(j)

    def _search(self, j: int, now: float) -> Sequence[Event]:
        return [] if self._shares(j) else super()._search(j, now)

    def _shares(self, j: int) -> bool:
        return j in self._hosting or j in self._hosting.values()

    def _speed(self, j: int, spot: Allocation) -> float:
        return super()._speed(j, spot) / self._crowd(j)

    def _crowd(self, j: int) -> float:
        """What all on the GPU of a job want of it, in parts of the GPU; 1 at least."""
        host = self._hosting.get(j, j)
        there = [host, *(guest for guest, its in self._hosting.items() if its == host)]
        wanted = sum(need.utilisation for need in map(self._need, there) if need)
        return max(wanted, 1.0) if len(there) > 1 else 1.0

    # -- guests ------------------------------------------------------------------------------------

    def _join(self, guest: int, host: int, now: float) -> None:
        record = self.record
        if np.isnan(record.first_start_s[guest]):
            record.first_start_s[guest] = now
        record.wait_s[guest] += now - self._waiting_from[guest]
        self._hosting[guest], self._since_guest[guest] = host, now
        self._log(guest, 1, now)
        self._figures["guests"] += 1
        self._running += 1
        self._version[guest] += 1
        use = self._use[guest]
        self._train(guest, (1, *self._spot[host][1:3], 0), now + (use.phases.pre_s if use else 0.0))
        self._rerate(host, now, besides=guest)

    def _part(self, guest: int, now: float) -> None:
        """The guest stands still where it is; whoever stays goes on with more of the GPU."""
        host = self._hosting.pop(guest)
        self._figures["guest_s"] += now - self._since_guest.pop(guest)
        self._running -= 1
        self._settle(guest, now)
        self._version[guest] += 1
        self._gpus[guest], self._rate[guest] = 0, 0.0
        self._waiting_from[guest] = now
        self._observe(guest, 0.0, now)
        self._rerate(host, now)

    def _log(self, guest: int, gpus: int, now: float) -> None:
        """That a guest came or left; a share of its own, and its end, stand in the log by themselves."""
        record = self.record
        if self.timeline:
            record.guest_changes.append(len(record.change_s))
            record.change_s.append(now)
            record.change_job.append(guest)
            record.change_gpus.append(gpus)

    def _rerate(self, host: int, now: float, besides: int = -1) -> None:
        """The speeds of those on a GPU after someone came or went."""
        for j in (host, *(guest for guest, its in self._hosting.items() if its == host)):
            if j != besides and j in self.scheduler.view and self._gpus[j] == 1:
                self._settle(j, now)
                self._version[j] += 1
                self._train(j, self._spot[j], max(now, self._since[j]))
