"""Applies the decisions about GPU sharing to the live jobs.

`scheduler.sharing` decides after each decision of the scheduler. `Sharing` writes the result to `LiveJob.host`, and
the fixed runner moves the process to that GPU or away from it. A live job that is resized while it trains can be a
host, but it cannot be co-located.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from typing import Protocol

from shoal.executors.base import NodeInfo
from shoal.scheduler.scheduler import Scheduler
from shoal.scheduler.sharing.colocation import Colocation
from shoal.scheduler.sharing.prescheduling import PreScheduling
from shoal.server.api.models import JobState
from shoal.server.loop.devices import Device, Devices
from shoal.server.loop.live_job import LiveJob
from shoal.server.loop.outbox import Outbox
from shoal.server.loop.profiles import Profiles
from shoal.server.loop.sharing.explanations import Explanations
from shoal.server.loop.sharing.gpu_facts import GpuFacts

#: Pre-scheduling depends on time alone, too. It is decided again no more often than this.
AGAIN_S = 0.05


class SharingLoop(Protocol):
    """What sharing needs of the control loop."""

    @property
    def scheduler(self) -> Scheduler:
        """The scheduler in force. A change of policy replaces it."""

    @property
    def is_running(self) -> bool:
        """Whether decisions are made: the server has started and does not stop."""

    def now_s(self) -> float: ...

    def soon(self, job: LiveJob) -> None: ...

    def reconcile_next(self, job_id: int) -> None: ...

    def settle_soon(self) -> None: ...

    def settle(self) -> None: ...


class Sharing:
    def __init__(
        self,
        loop: SharingLoop,
        jobs: Mapping[int, LiveJob],
        nodes: Sequence[NodeInfo],
        devices: Devices,
        outbox: Outbox,
        profiles: Profiles,
        *,
        share: bool,
        pre_schedule: bool,
    ) -> None:
        self.loop, self.jobs, self.devices, self.outbox = loop, jobs, devices, outbox
        #: Jobs that have a host.
        self._hosted: set[int] = set()
        self.facts = facts = GpuFacts(jobs, nodes, devices, profiles.left_s, self._hosted)
        self.colocation: Colocation | None = None
        self.prescheduling: PreScheduling | None = None
        if share:
            self.colocation = Colocation(loop.scheduler, facts.need, facts.memory_mb, may_join=self._may_join)
        if pre_schedule:
            self.prescheduling = PreScheduling(
                loop.scheduler, facts.phases, may_launch=facts.may_launch, left_of=facts.gpu_left_s
            )
        self.explanations = Explanations(jobs, nodes, facts, profiles.left_s, self.colocation)
        #: Whether a process began or ended on a GPU since the last decision.
        self.stale = False
        self._timer: asyncio.TimerHandle | None = None
        #: The scheduler that the deciders use.
        self._scheduler: Scheduler | None = None

    @property
    def on(self) -> bool:
        return self.colocation is not None or self.prescheduling is not None

    def _may_join(self, job_id: int, host: int) -> bool:
        assert self.colocation is not None
        return self.facts.may_join(job_id, host, self.colocation.colocated_with)

    # -- deciding ----------------------------------------------------------------------------------

    def decide(self, now_s: float) -> None:
        """Decide which jobs leave a GPU, which join one, and which prepare on one.

        Called after each decision of the scheduler, and after a process began or ended.
        """
        self.stale = False
        self._follow_scheduler()
        if self.colocation is not None:
            plan = self.colocation.step()
            self._leave_unless(self.colocation.host_of, prescheduled=False)
            for job_id, host in plan.join:
                self._join(job_id, host, prescheduled=False)
        if self.prescheduling is not None:
            early = self.prescheduling.step(now_s)
            self._leave_unless(self.prescheduling.beside, prescheduled=True)
            for job_id, host in early.launch:
                self._join(job_id, host, prescheduled=True)
            self._wake_at(early.wake_s, now_s)

    def _follow_scheduler(self) -> None:
        """Continue under a new scheduler: after a change of the policy, or after a restart of the server."""
        scheduler = self.loop.scheduler
        if self._scheduler is scheduler:
            return
        self._scheduler = scheduler
        colocated: dict[int, int] = {}
        prescheduled: dict[int, int] = {}
        for job in list(self.jobs.values()):
            if job.host is not None:
                self._hosted.add(job.id)
                (prescheduled if job.prescheduled else colocated)[job.id] = job.host
                if not self._allows(job):
                    self._leave(job.id)  # the last server allowed it, this one does not
        if self.colocation is not None:
            self.colocation.take_over(scheduler, colocated)
        if self.prescheduling is not None:
            self.prescheduling.take_over(scheduler, prescheduled)

    def _allows(self, job: LiveJob) -> bool:
        """Whether this server allows the kind of sharing that the job does."""
        return (self.prescheduling if job.prescheduled else self.colocation) is not None

    def _join(self, job_id: int, host_id: int, *, prescheduled: bool) -> None:
        job, host = self.jobs[job_id], self.jobs[host_id]
        job.host, job.prescheduled, job.shared, host.shared = host_id, prescheduled, True, True
        self._hosted.add(job_id)
        text, evidence = self.explanations.joined(job, host)
        self.outbox.event("job.early" if prescheduled else "job.guest", text, job, **evidence)
        for changed in (job, host):
            self.outbox.job(changed)
        self.loop.reconcile_next(job_id)

    def _leave_unless(self, hosts: Mapping[int, int], *, prescheduled: bool) -> None:
        """Jobs of one kind that the decider no longer lists leave their host."""
        for job_id in self._hosted - hosts.keys():
            job = self.jobs.get(job_id)
            if job is None or job.prescheduled == prescheduled:
                self._leave(job_id)

    def _leave(self, job_id: int) -> None:
        self._hosted.discard(job_id)
        job = self.jobs.get(job_id)
        if job is not None and job.host is not None:
            job.host = None
            self.outbox.job(job)
            self.loop.reconcile_next(job_id)

    def _wake_at(self, wake_s: float, now_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if math.isfinite(wake_s):
            self._timer = asyncio.get_running_loop().call_later(max(wake_s - now_s, AGAIN_S), self._again)

    def _again(self) -> None:
        if self.loop.is_running:
            self.decide(self.loop.now_s())
            self.loop.settle()

    # -- what runners report and ask ---------------------------------------------------------------

    def process_began(self, job: LiveJob) -> None:
        """The job's process is on a GPU: others may join it."""
        if self.on:
            self.stale = True
            for other in self.jobs.values():
                if other.host == job.id:
                    self.loop.soon(other)

    def process_left(self) -> None:
        """A process on a GPU has ended or was suspended: other jobs may join."""
        if self.on:
            self.stale = True
            self.loop.settle_soon()

    def place(self, job: LiveJob) -> Device | None:
        """The GPU of another job on which this job is to run or prepare now; None if there is none."""
        if job.host is None or not self._allows(job):
            return None
        if job.life.state in (JobState.PAUSED, JobState.STOPPING):
            return None
        device = self.facts.device_of(self.jobs.get(job.host))
        if device is None and job.colocated:
            # Its host is between two processes or has just ended. Stay until the next decision.
            device = next(iter(job.workers.values())).device
        return device

    def beside(self, job: LiveJob) -> set[Device]:
        """GPUs with jobs that are co-located with this job."""
        if not self.devices.has_colocated:
            return set()
        return {
            worker.device
            for other in self.jobs.values()
            if other.host == job.id
            for worker in other.workers.values()
            if worker.colocated
        }
