"""How many GPUs the jobs would take at once if there were more machines: to start, or to become faster."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from shoal.core.profile import Profile
from shoal.core.reason import Code
from shoal.engines.capacity import Demand
from shoal.scheduler.explain import NO_GAIN
from shoal.scheduler.scheduler import Scheduler
from shoal.server.api.models import Resize
from shoal.server.loop.live_job import LiveJob

#: Reasons that more machines do not remove.
OTHER_REASONS = frozenset(
    {
        Code.HELD,
        Code.EXCEEDS_LIMIT,
        Code.NOT_BEFORE,
        Code.DEPENDENCY,
        Code.MEASURING,
        Code.QUOTA_EXHAUSTED,
        Code.COOL_DOWN,
    }
)


class DemandLoop(Protocol):
    """What the demand needs of the control loop."""

    @property
    def jobs(self) -> Mapping[int, LiveJob]: ...

    @property
    def scheduler(self) -> Scheduler: ...

    def now_s(self) -> float: ...


def demand_of(loop: DemandLoop, most_gpus: int) -> list[Demand]:
    """Of jobs that wait, then of jobs that run. It stops when `most_gpus` are wanted: no more can be provided.

    A job whose minimum is above `most_gpus` wants none: it could not start even then.
    """
    scheduler, found, total_gpus = loop.scheduler, list[Demand](), 0
    active = [job for job in loop.jobs.values() if job.id in scheduler.view]
    for job in sorted(active, key=lambda j: (j.target_gpus > 0, j.id)):
        if total_gpus >= most_gpus:
            break
        missing_gpus = _missing_gpus(job, scheduler, most_gpus, loop.now_s())
        if missing_gpus > 0:
            found.append(Demand(missing_gpus, tuple(job.spec["gpu_types"])))
            total_gpus += missing_gpus
    return found


def _missing_gpus(job: LiveJob, scheduler: Scheduler, most_gpus: int, now_s: float) -> int:
    elastic = scheduler.policy.elastic and job.resize is not Resize.NEVER
    least = job.min_gpus if elastic else job.requested_gpus
    if least > most_gpus or job.ending is not None or job.grows_s is not None:
        return 0
    if job.target_gpus and not elastic:
        return 0
    reason = scheduler.outcome(job.id, now_s).reason
    if reason is not None and (reason.code in OTHER_REASONS or "autoscaler_gpus" in reason.evidence):
        return 0
    most = _useful_gpus(job, scheduler) if elastic else job.requested_gpus
    return job.range.floor(min(most, most_gpus)) - job.target_gpus


def _useful_gpus(job: LiveJob, scheduler: Scheduler) -> int:
    """The most GPUs that would make the job faster, as far as is known.

    What is known ends at the size of the present cluster. If the job still gains there, more GPUs may help. If its
    measured speed ends its growth below that, they do not.
    """
    limit = min(job.max_gpus, max(scheduler.cluster.total_gpus, job.min_gpus))
    useful = int(scheduler.view.max_gpus[scheduler.view.row(job.id)])
    profile = scheduler.profiles[job.id]
    gpu_type = job.gpu_type or scheduler.cluster.gpu_types[0]
    if profile.knows(gpu_type):
        while useful > job.min_gpus and not _gains(profile, gpu_type, useful):
            useful -= 1
    return job.max_gpus if useful >= limit else useful


def _gains(profile: Profile, gpu_type: str, gpus: int) -> bool:
    """Whether the last of so many GPUs adds to the speed."""
    without = profile.speed(gpu_type, gpus - 1)
    return without <= 0 or profile.speed(gpu_type, gpus) / without - 1.0 >= NO_GAIN
