"""Live jobs that share a GPU: co-located jobs, and pre-scheduled jobs that prepare where another is about to end.

`scheduler.sharing` decides, as in the simulator, after each decision of the scheduler. This module answers its
questions about the live jobs and writes the result to `LiveJob.host`; the fixed runner moves the process there
and away. A live job that is resized while it trains can be a host, but not co-located.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from shoal.core.words import listed
from shoal.executors.base import NodeInfo
from shoal.scheduler.scheduler import Scheduler
from shoal.scheduler.sharing.colocation import Colocation, Need
from shoal.scheduler.sharing.prescheduling import Phases, PreScheduling
from shoal.server.api.models import JobState, Reason, Resize
from shoal.server.loop.devices import Device, Devices
from shoal.server.loop.live_job import ACTIVE, SUSPENDED, LiveJob, LiveWorker
from shoal.server.loop.outbox import Outbox
from shoal.server.loop.profiles import Profiles

MOST_NAMED = 3
#: What may change without an event is looked at no more often than this.
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
        self.loop = loop
        self.jobs, self.nodes, self.devices, self.outbox = jobs, nodes, devices, outbox
        self.profiles = profiles
        self.colocation: Colocation | None = None
        self.prescheduling: PreScheduling | None = None
        if share:
            self.colocation = Colocation(loop.scheduler, self._need, self._memory_mb, may_join=self._may_join)
        if pre_schedule:
            self.prescheduling = PreScheduling(
                loop.scheduler, self._phases, may_launch=self._may_launch, left_of=self._left_s
            )
        #: A process has begun or gone on a GPU since it was last decided who may be there, too.
        self.stale = False
        self._timer: asyncio.TimerHandle | None = None
        #: Jobs that have a host.
        self._hosted: set[int] = set()
        #: Whose jobs the deciders know.
        self._scheduler: Scheduler | None = None

    @property
    def on(self) -> bool:
        return self.colocation is not None or self.prescheduling is not None

    # -- deciding ----------------------------------------------------------------------------------

    def decide(self, now_s: float) -> None:
        """After a cycle of the scheduler, or when a process began: who leaves, who joins, who prepares."""
        self.stale = False
        self._take_over()
        if self.colocation is not None:
            plan = self.colocation.step()
            self._part_unless(self.colocation.host_of, early=False)
            for job_id, host in plan.join:
                self._join(job_id, host, early=False)
        if self.prescheduling is not None:
            early = self.prescheduling.step(now_s)
            self._part_unless(self.prescheduling.beside, early=True)
            for job_id, host in early.launch:
                self._join(job_id, host, early=True)
            self._wake_at(early.wake_s, now_s)

    def _take_over(self) -> None:
        """Go on under a new scheduler, of another policy or of a server that was started again."""
        scheduler = self.loop.scheduler
        if self._scheduler is scheduler:
            return
        self._scheduler = scheduler
        guests: dict[int, int] = {}
        early: dict[int, int] = {}
        for job in list(self.jobs.values()):
            if job.host is not None:
                self._hosted.add(job.id)
                (early if job.prescheduled else guests)[job.id] = job.host
                if self._decider(job) is None:
                    self._leave(job.id)  # that was allowed to the last server
        if self.colocation is not None:
            self.colocation.take_over(scheduler, guests)
        if self.prescheduling is not None:
            self.prescheduling.take_over(scheduler, early)

    def _decider(self, job: LiveJob) -> Colocation | PreScheduling | None:
        return self.prescheduling if job.prescheduled else self.colocation

    def _join(self, job_id: int, host_id: int, *, early: bool) -> None:
        job, host = self.jobs[job_id], self.jobs[host_id]
        job.host, job.prescheduled, job.shared, host.shared = host_id, early, True, True
        self._hosted.add(job_id)
        where = self._where(job, host, host.user == job.user)
        text = f"{'it prepares' if early else 'it is a guest'} {where}"
        evidence = self._evidence(job, host)
        self.outbox.event("job.prescheduled" if early else "job.guest", text, job, **evidence)
        for changed in (job, host):
            self.outbox.job(changed)
        self.loop.reconcile_next(job_id)

    def _part_unless(self, hosts: Mapping[int, int], *, early: bool) -> None:
        """Those of one kind leave who are not among these any more."""
        for job_id in self._hosted - hosts.keys():
            job = self.jobs.get(job_id)
            if job is None or job.prescheduled == early:
                self._leave(job_id)

    def _leave(self, job_id: int) -> None:
        self._hosted.discard(job_id)
        job = self.jobs.get(job_id)
        if job is not None and job.host is not None:
            job.host = None
            self.outbox.job(job)
            self.loop.reconcile_next(job_id)

    def look_again(self) -> None:
        """A process is gone from a GPU, or stands still: others may come."""
        if self.on:
            self.stale = True
            self.loop.settle_soon()

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

    # -- what the deciders ask ---------------------------------------------------------------------

    def _need(self, job_id: int) -> Need | None:
        job = self.jobs.get(job_id)
        if job is None or not job.needs or (job.resize is Resize.LIVE and not job.workers):
            return None
        memory_mb, percent = job.needs.get("gpu_mem_mb"), job.needs.get("gpu_util")
        return None if memory_mb is None or percent is None else Need(memory_mb, percent / 100)

    def _memory_mb(self, host: int) -> float:
        device = self.device_of(self.jobs.get(host))
        return self.nodes[device[0]].gpu_memory_mb if device is not None else 0.0

    def _phases(self, job_id: int) -> Phases | None:
        """Of jobs that have a GPU to themselves, and of those that wait and tell how long they prepare."""
        job = self.jobs.get(job_id)
        if job is None or self.shares(job):
            return None
        needs = job.needs or {}
        if job.target_gpus:
            return Phases(needs.get("pre_s", 0.0), needs.get("post_s", 0.0))
        return Phases(needs["pre_s"], needs.get("post_s", 0.0)) if "pre_s" in needs else None

    def _left_s(self, host: int) -> float:
        """Until its last use of the GPU, as far as that is known."""
        job = self.jobs.get(host)
        left_s = self.profiles.left_s(job) if job is not None else None
        if job is None or left_s is None:
            return math.nan
        return max(left_s - float((job.needs or {}).get("post_s", 0.0)), 0.0)

    def _may_join(self, guest: int, host: int) -> bool:
        """Whether its process can be on that GPU now, and all that are there are known."""
        job, device = self.jobs.get(guest), self.device_of(self.jobs.get(host))
        if job is None or device is None or not self._can_come(job, device):
            return False
        if (job.host is not None and job.prescheduled) or any(j.prescheduled for j in self._beside(host)):
            return False
        known = {guest, host, *(self.colocation.colocated_with(host) if self.colocation is not None else ())}
        return self._present(device) <= known

    def _may_launch(self, job_id: int, host: int) -> bool:
        """As above, and the memory of both must fit: a command cannot be kept from using the GPU too soon."""
        job, other = self.jobs.get(job_id), self.jobs.get(host)
        device = self.device_of(other)
        if job is None or other is None or device is None or not self._can_come(job, device):
            return False
        if job.host is not None or job.workers or self._beside(host):
            return False
        known_mb = [mb for j in (job, other) if (mb := (j.needs or {}).get("gpu_mem_mb")) is not None]
        fits = len(known_mb) == 2 and sum(known_mb) < self.nodes[device[0]].gpu_memory_mb
        return fits and self._present(device) <= {host}

    def _beside(self, host: int) -> list[LiveJob]:
        """Those that are, or are about to be, on the GPU of a job."""
        there = [self.jobs[job_id] for job_id in self._hosted if job_id in self.jobs]
        return [job for job in there if job.host == host]

    def _can_come(self, job: LiveJob, device: Device) -> bool:
        if (
            job.resize is Resize.LIVE
            or job.ending is not None
            or job.life.state in (JobState.PAUSED, JobState.STOPPING)
        ):
            return False
        if not job.workers:
            return True
        worker = next(iter(job.workers.values()))
        rests = worker.state == SUSPENDED or (worker.colocated and worker.state == ACTIVE)
        # What is on a real GPU cannot move to another. A virtual one is no more than a number.
        same = worker.device == device or (worker.device[0] == device[0] and self.nodes[device[0]].virtual)
        return len(job.workers) == 1 and rests and same

    def _present(self, device: Device) -> set[int]:
        """Jobs other than the owner with a process on this GPU: co-located ones and, on a real GPU, suspended ones."""
        found = {int(worker.partition(".")[0]) for worker in self.devices.colocated_on(device)}
        if not self.nodes[device[0]].virtual:
            found |= {
                job.id
                for job in self.jobs.values()
                for worker in job.workers.values()
                if worker.device == device and worker.state == SUSPENDED
            }
        return found

    # -- what crews and others ask -----------------------------------------------------------------

    def device_of(self, job: LiveJob | None) -> Device | None:
        """The GPU of a job that has just one, or will in a moment where it is a guest already."""
        if job is None or job.ending is not None or len(job.workers) != 1:
            return None
        worker = next(iter(job.workers.values()))
        if worker.state != ACTIVE or worker.device[0] < 0:
            return None
        owns = self.devices.owner(worker.device) == worker.id
        inherits = worker.colocated and job.target_gpus and self.devices.owner(worker.device) is None
        return worker.device if owns or inherits else None

    def place(self, job: LiveJob) -> Device | None:
        """The GPU on which a job is to be as a guest, or to prepare; None if on no one's."""
        if job.host is None or self._decider(job) is None:
            return None
        if job.life.state in (JobState.PAUSED, JobState.STOPPING):
            return None
        device = self.device_of(self.jobs.get(job.host))
        if device is None and job.colocated:
            # Its host is between two processes, or has just ended: what follows is about to be decided.
            device = next(iter(job.workers.values())).device
        return device

    def beside(self, job: LiveJob) -> set[Device]:
        """GPUs where guests of a job are, while its own process is not (any more)."""
        if not self.devices.has_colocated:
            return set()
        return {w.device for j in self.jobs.values() if j.host == job.id for w in _colocated_workers(j)}

    def began(self, job: LiveJob) -> None:
        """Its process is on a GPU: others may join it."""
        if self.on:
            self.stale = True
            for other in self.jobs.values():
                if other.host == job.id:
                    self.loop.soon(other)

    def shares(self, job: LiveJob) -> bool:
        """Whether there is another on its GPU, so that its speed says nothing of what it would do alone."""
        return job.colocated or any(
            w.holds_gpu and self.devices.colocated_on(w.device) for w in job.workers.values()
        )

    # -- what people ask ---------------------------------------------------------------------------

    def explain(self, job: LiveJob, reason: Reason, may_see: bool) -> Reason:
        """The reason why it has no GPU of its own, and where it is all the same, or why it is nowhere."""
        host = self.jobs.get(job.host) if job.host is not None else None
        if host is not None and job.colocated:
            what = "it prepares" if job.prescheduled else "it runs as a guest"
            where = self._where(job, host, may_see or host.user == job.user)
            text = f"{what} {where}, and waits for a GPU of its own: {reason.sentence}"
            return Reason(
                code=reason.code, sentence=text, evidence=reason.evidence | self._evidence(job, host)
            )
        if self.colocation is not None and not job.target_gpus and job.id in self.loop.scheduler.view:
            why_not = self._why_no_guest(job)
            if why_not is not None:
                reason.evidence["sharing"] = why_not
        return reason

    def _why_no_guest(self, job: LiveJob) -> str | None:
        assert self.colocation is not None
        if job.resize is Resize.LIVE:
            return "a job that resizes while it trains is no guest"
        return self.colocation.why_not(job.id)

    def with_whom(self, job: LiveJob, may_see: bool) -> str:
        """Who else is on the GPU of a job, for a sentence; empty if no one is."""
        there = [
            j
            for w in job.workers.values()
            if w.holds_gpu
            for other in sorted(self.devices.colocated_on(w.device))
            if (j := self.jobs.get(int(other.partition(".")[0]))) is not None
        ]
        names = [_name(j, may_see or j.user == job.user) for j in there]
        return listed(names[:MOST_NAMED], len(names)) if names else ""

    def _where(self, job: LiveJob, host: LiveJob, may_see: bool) -> str:
        device = self.device_of(host) or (next((w.device for w in _colocated_workers(job)), None))
        at = f"on GPU {device[1]} of {self.nodes[device[0]].name}, " if device is not None else ""
        return f"{at}{'where' if job.prescheduled else 'beside'} {_name(host, may_see)}" + (
            " is about to end" if job.prescheduled else ""
        )

    def _evidence(self, job: LiveJob, host: LiveJob) -> dict[str, Any]:
        """The numbers behind it."""
        found: dict[str, Any] = {"host": host.id}
        for key in ("pre_s", "gpu_mem_mb") if job.prescheduled else ("gpu_mem_mb", "gpu_util"):
            found |= {key: value} if (value := (job.needs or {}).get(key)) is not None else {}
        if job.prescheduled:
            left_s = self.profiles.left_s(host)
            return found | ({"host_ends_in_s": left_s} if left_s is not None else {})
        if self.colocation is not None:
            on_it = [self._need(i) for i in (host.id, *self.colocation.colocated_with(host.id))]
            found["utilisation"] = sum(need.utilisation for need in on_it if need is not None)
            found["max_utilisation"] = self.colocation.rule.max_utilisation
        return found | {"needs_by": (job.needs or {}).get("basis", "")}


def _colocated_workers(job: LiveJob) -> list[LiveWorker]:
    return [worker for worker in job.workers.values() if worker.colocated]


def _name(job: LiveJob, may_see: bool) -> str:
    return job.name if may_see else f"a job of {job.user}"
