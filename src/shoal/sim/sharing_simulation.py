"""A simulation in which waiting jobs are co-located on GPUs in use, or pre-scheduled (Liquid, TPDS'21).

Jobs on one GPU run at full speed while the sum of their utilisations is at most 1. Beyond that, each is slowed
down by that sum. A job first prepares for `pre_s` and holds its GPU for `post_s` after its work. A pre-scheduled
job has prepared in advance, if it then gets the GPU on which it prepared.
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
from shoal.scheduler.sharing.colocation import Colocation, Need
from shoal.scheduler.sharing.prescheduling import Phases, PreScheduling
from shoal.sim.engine import FINISH, Allocation, Simulation

GPU_MEMORY_MB = 16_384.0


@dataclass(frozen=True, slots=True)
class Use:
    """How one worker of a model uses its GPU."""

    need: Need
    phases: Phases = field(default_factory=lambda: Phases(0.0, 0.0))


class SharingSimulation(Simulation):
    """A simulation with co-location (`share`) and pre-scheduling (`early`); None turns either off.

    `uses` are by model. Jobs of other models are neither co-located nor pre-scheduled.
    """

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
        self._colocation = Colocation(self.scheduler, self._need, memory_mb, share) if share else None
        self._early = PreScheduling(self.scheduler, self._phases, early) if early else None
        #: Co-located job -> the job whose GPU it shares, and since when.
        self._host_of: dict[int, int] = {}
        self._colocated_since: dict[int, float] = {}
        #: Pre-scheduled job -> (the job on whose GPU it prepares, since when).
        self._preparing: dict[int, tuple[int, float]] = {}
        self._figures = {"guests": 0, "guest_s": 0.0, "launched_early": 0, "prepared_early_s": 0.0}
        self.record.extra["sharing"] = self._figures

    def _need(self, j: int) -> Need | None:
        use = self._use[j]
        return use.need if use else None

    def _phases(self, j: int) -> Phases | None:
        """The phases of jobs that do not share a GPU."""
        use = self._use[j]
        return None if use is None or self._shares(j) else use.phases

    # -- extensions of the engine ------------------------------------------------------------------

    def _apply(self, command: Reconfigure, now: float) -> None:
        j, began_s = command.job, self.record.first_start_s[command.job]
        if j in self._host_of:
            self._leave(j, now)
        super()._apply(command, now)
        if not np.isnan(began_s):  # it started earlier, as a co-located job
            self.record.first_start_s[j] = began_s

    def _finish(self, j: int, now: float) -> None:
        if j in self._host_of:
            self._leave(j, now)
        super()._finish(j, now)

    def _after_plan(self, now: float) -> float:
        wake_s = super()._after_plan(now)
        if self._colocation:
            plan = self._colocation.step()
            for job in plan.leave:
                if job in self._host_of:
                    self._leave(job, now)
                    self._log(job, 0, now)
            for job, host in plan.join:
                self._join(job, host, now)
        if self._early:
            early = self._early.step(now)
            for job in early.withdraw:
                del self._preparing[job]
            for job, host in early.launch:
                self._preparing[job] = host, now
                self._figures["launched_early"] += 1
            wake_s = min(wake_s, early.wake_s)
        return wake_s

    def _change_share(
        self, j: int, allocation: Allocation, verb: str, pending: tuple[Allocation, float] | None, now: float
    ) -> None:
        host, since_s = self._preparing.pop(j, (-1, now))
        use = self._use[j]
        if verb != "start" or use is None or use.phases.pre_s == 0:
            super()._change_share(j, allocation, verb, pending, now)
            return
        there = host >= 0 and allocation[1:3] == self._allocation[host][1:3]
        prepared_s = min(now - since_s, use.phases.pre_s) if there else 0.0
        self._figures["prepared_early_s"] += prepared_s
        self._pause_then_train(j, allocation, use.phases.pre_s - prepared_s, now)

    def _push(self, at_s: float, kind: int, j: int) -> None:
        use = self._use[j]
        super()._push(at_s + use.phases.post_s if kind == FINISH and use else at_s, kind, j)

    def _measure(self, j: int) -> list[Event]:
        """Do not measure jobs that share a GPU: the result would not hold for the job alone."""
        return [] if self._shares(j) else super()._measure(j)

    def _search(self, j: int, now: float) -> Sequence[Event]:
        return [] if self._shares(j) else super()._search(j, now)

    def _shares(self, j: int) -> bool:
        return j in self._host_of or j in self._host_of.values()

    def _speed(self, j: int, allocation: Allocation) -> float:
        return super()._speed(j, allocation) / self._crowd(j)

    def _crowd(self, j: int) -> float:
        """The total utilisation of the jobs on the GPU of job `j`; at least 1."""
        host = self._host_of.get(j, j)
        there = [host, *(job for job, its in self._host_of.items() if its == host)]
        wanted = sum(need.utilisation for need in map(self._need, there) if need)
        return max(wanted, 1.0) if len(there) > 1 else 1.0

    # -- co-located jobs ---------------------------------------------------------------------------

    def _join(self, job: int, host: int, now: float) -> None:
        record = self.record
        if np.isnan(record.first_start_s[job]):
            record.first_start_s[job] = now
        record.wait_s[job] += now - self._waiting_from[job]
        self._host_of[job], self._colocated_since[job] = host, now
        self._log(job, 1, now)
        self._figures["guests"] += 1
        self._running += 1
        self._version[job] += 1
        use = self._use[job]
        self._train(job, (1, *self._allocation[host][1:3], 0), now + (use.phases.pre_s if use else 0.0))
        self._rerate(host, now, besides=job)

    def _leave(self, job: int, now: float) -> None:
        """The job stops; the jobs that stay on the GPU speed up."""
        host = self._host_of.pop(job)
        self._figures["guest_s"] += now - self._colocated_since.pop(job)
        self._running -= 1
        self._settle(job, now)
        self._version[job] += 1
        self._gpus[job], self._rate[job] = 0, 0.0
        self._waiting_from[job] = now
        self._observe(job, 0.0, now)
        self._rerate(host, now)

    def _log(self, job: int, gpus: int, now: float) -> None:
        """Log that a co-located job joined or left. Its own shares and its end are logged elsewhere."""
        record = self.record
        if self.timeline:
            record.colocation_changes.append(len(record.change_s))
            record.change_s.append(now)
            record.change_job.append(job)
            record.change_gpus.append(gpus)

    def _rerate(self, host: int, now: float, besides: int = -1) -> None:
        """Update the speeds of the jobs on a GPU after one joined or left."""
        for j in (host, *(job for job, its in self._host_of.items() if its == host)):
            if j != besides and j in self.scheduler.view and self._gpus[j] == 1:
                self._settle(j, now)
                self._version[j] += 1
                self._train(j, self._allocation[j], max(now, self._since[j]))
