"""What is known of the GPUs that live jobs share. It only reads: the deciders of `scheduler.sharing` ask it."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence, Set

from shoal.executors.base import NodeInfo
from shoal.scheduler.sharing.colocation import Need
from shoal.scheduler.sharing.prescheduling import Phases
from shoal.server.api.models import JobState, Resize
from shoal.server.loop.devices import Device, Devices
from shoal.server.loop.live_job import ACTIVE, SUSPENDED, LiveJob

ColocatedWith = Callable[[int], Collection[int]]
"""The jobs that are co-located with a host, by job id."""


class GpuFacts:
    def __init__(
        self,
        jobs: Mapping[int, LiveJob],
        nodes: Sequence[NodeInfo],
        devices: Devices,
        left_s: Callable[[LiveJob], float | None],
        hosted: Set[int],
    ) -> None:
        """`left_s`: the predicted seconds until a job ends; `hosted`: the jobs that have a host."""
        self._jobs, self._nodes, self._devices = jobs, nodes, devices
        self._left_s, self._hosted = left_s, hosted

    # -- what a job needs --------------------------------------------------------------------------

    def need(self, job_id: int) -> Need | None:
        job = self._jobs.get(job_id)
        if job is None or not job.needs or (job.resize is Resize.LIVE and not job.workers):
            return None
        memory_mb, percent = job.needs.get("gpu_mem_mb"), job.needs.get("gpu_util")
        return None if memory_mb is None or percent is None else Need(memory_mb, percent / 100)

    def phases(self, job_id: int) -> Phases | None:
        """The phases of a job that has a GPU to itself, or of one that waits and whose preparation time is known."""
        job = self._jobs.get(job_id)
        if job is None or self.shares(job):
            return None
        needs = job.needs or {}
        if job.target_gpus:
            return Phases(needs.get("pre_s", 0.0), needs.get("post_s", 0.0))
        return Phases(needs["pre_s"], needs.get("post_s", 0.0)) if "pre_s" in needs else None

    def gpu_left_s(self, host: int) -> float:
        """Seconds until a job's last use of its GPU; nan if unknown."""
        job = self._jobs.get(host)
        left_s = self._left_s(job) if job is not None else None
        if job is None or left_s is None:
            return math.nan
        return max(left_s - float((job.needs or {}).get("post_s", 0.0)), 0.0)

    # -- which jobs are on a GPU -------------------------------------------------------------------

    def device_of(self, job: LiveJob | None) -> Device | None:
        """The GPU of a job that has exactly one, or that takes over the GPU where it is co-located."""
        if job is None or job.ending is not None or len(job.workers) != 1:
            return None
        worker = next(iter(job.workers.values()))
        if worker.state != ACTIVE or worker.device[0] < 0:
            return None
        owns = self._devices.owner(worker.device) == worker.id
        takes_over = worker.colocated and job.target_gpus and self._devices.owner(worker.device) is None
        return worker.device if owns or takes_over else None

    def memory_mb(self, host: int) -> float:
        """The memory of the GPU of a job; 0 if the job does not have exactly one."""
        device = self.device_of(self._jobs.get(host))
        return self._nodes[device[0]].gpu_memory_mb if device is not None else 0.0

    def shares(self, job: LiveJob) -> bool:
        """Whether another job is on its GPU, so that its measured speed is not the speed it has alone."""
        return job.colocated or any(
            w.holds_gpu and self._devices.colocated_on(w.device) for w in job.workers.values()
        )

    def colocated_on_gpus_of(self, job: LiveJob) -> list[LiveJob]:
        """The jobs that are co-located on the GPUs of this job."""
        return [
            other
            for w in job.workers.values()
            if w.holds_gpu
            for worker in sorted(self._devices.colocated_on(w.device))
            if (other := self._jobs.get(int(worker.partition(".")[0]))) is not None
        ]

    def _hosted_by(self, host: int) -> list[LiveJob]:
        """Jobs that are, or are about to be, on the GPU of a host."""
        hosted = [self._jobs[job_id] for job_id in self._hosted if job_id in self._jobs]
        return [job for job in hosted if job.host == host]

    def _present(self, device: Device) -> set[int]:
        """Jobs other than the owner with a process on this GPU: co-located ones and, on a real GPU, suspended ones."""
        found = {int(worker.partition(".")[0]) for worker in self._devices.colocated_on(device)}
        if not self._nodes[device[0]].virtual:
            found |= {
                job.id
                for job in self._jobs.values()
                for worker in job.workers.values()
                if worker.device == device and worker.state == SUSPENDED
            }
        return found

    # -- which jobs may share ----------------------------------------------------------------------

    def may_join(self, job_id: int, host: int, colocated_with: ColocatedWith) -> bool:
        """Whether the job's process can be on the host's GPU now, and all jobs with a process there are known."""
        job, device = self._jobs.get(job_id), self.device_of(self._jobs.get(host))
        if job is None or device is None or not self._can_move_to(job, device):
            return False
        if (job.host is not None and job.prescheduled) or any(j.prescheduled for j in self._hosted_by(host)):
            return False
        return self._present(device) <= {job_id, host, *colocated_with(host)}

    def may_launch(self, job_id: int, host: int) -> bool:
        """Whether the job can prepare on the host's GPU now.

        The memory of both must fit, because nothing keeps a command from using the GPU too early.
        """
        job, other = self._jobs.get(job_id), self._jobs.get(host)
        device = self.device_of(other)
        if job is None or other is None or device is None or not self._can_move_to(job, device):
            return False
        if job.host is not None or job.workers or self._hosted_by(host):
            return False
        known_mb = [mb for j in (job, other) if (mb := (j.needs or {}).get("gpu_mem_mb")) is not None]
        fits = len(known_mb) == 2 and sum(known_mb) < self._nodes[device[0]].gpu_memory_mb
        return fits and self._present(device) <= {host}

    def _can_move_to(self, job: LiveJob, device: Device) -> bool:
        if (
            job.resize is Resize.LIVE
            or job.ending is not None
            or job.life.state in (JobState.PAUSED, JobState.STOPPING)
        ):
            return False
        if not job.workers:
            return True
        worker = next(iter(job.workers.values()))
        may_move = worker.state == SUSPENDED or (worker.colocated and worker.state == ACTIVE)
        # A process on a real GPU cannot move to another. A virtual GPU is only a number.
        same = worker.device == device or (worker.device[0] == device[0] and self._nodes[device[0]].virtual)
        return len(job.workers) == 1 and may_move and same
