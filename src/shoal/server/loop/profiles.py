"""The profiles of the live jobs: made from measurements of earlier jobs and updated as steps are measured."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Protocol

from shoal.core.events import Event, Measured, WorkerFailed
from shoal.core.job import GpuRange, Job, Throttle
from shoal.core.profile import Profile
from shoal.core.reason import Reason as CoreReason
from shoal.executors.base import NodeInfo
from shoal.knowledge.speed_estimator import SpeedEstimator
from shoal.scheduler.scheduler import Scheduler
from shoal.server.api.models import Estimate, JobState, Reason, Resize
from shoal.server.loop.dependencies import Dependencies
from shoal.server.loop.learning import ASSUMED_LENGTH_S, Learner, Length, fixed_profile
from shoal.server.loop.live_job import LiveJob
from shoal.server.loop.outbox import Outbox
from shoal.server.store.store import Store

#: A job on more nodes than that is believed to be as slow as on so many.
MOST_NODES = 8


class TakeIn(Protocol):
    """Take in events for the scheduler and decide soon."""

    def __call__(self, *events: Event) -> None: ...


class Profiles:
    def __init__(
        self,
        jobs: Mapping[int, LiveJob],
        nodes: Sequence[NodeInfo],
        store: Store,
        outbox: Outbox,
        take_in: TakeIn,
        scheduler: Callable[[], Scheduler],
        now_s: Callable[[], float],
    ) -> None:
        """`take_in` takes events for the scheduler; a change of policy replaces the scheduler itself."""
        self._jobs, self._nodes, self._store, self._outbox = jobs, nodes, store, outbox
        self._take_in, self._scheduler, self._now_s = take_in, scheduler, now_s
        self._dependencies = Dependencies(jobs, store)
        self._learners: dict[int, Learner] = {}
        #: One estimator for all live jobs of a model word: they learn from each other.
        self._speeds: dict[str, SpeedEstimator] = {}
        self._fixed: dict[int, Profile] = {}

    def of(self, job: LiveJob) -> tuple[Job, Profile]:
        """The job as decisions see it, and its profile."""
        gpus = job.range
        profile, spec = self.profile(job), job.spec
        throttle = spec.get("throttle")
        return (
            Job(
                name=job.name,
                submit_s=job.life.submitted_s,
                gpus=gpus,
                requested_gpus=job.requested_gpus,
                user=job.user,
                model=job.model,
                iterations=max(self._steps_left(job), 1e-6),
                gpu_types=tuple(spec["gpu_types"]),
                weight=spec["weight"],
                priority=spec.get("priority", 0),
                not_before_s=_seconds(spec.get("not_before")) or 0.0,
                after=self._dependencies.unmet(job),
                time_limit_s=spec.get("time_limit_s"),
                deadline_s=_seconds(spec.get("deadline")),
                throttle=None if throttle is None else Throttle(*throttle),
                autoscale=spec.get("autoscale") or "",
            ),
            profile,
        )

    def profile(self, job: LiveJob) -> Profile:
        if job.resize is Resize.NEVER:
            return self._fixed.setdefault(job.max_gpus, fixed_profile("fixed", job.max_gpus))
        learner = self.learner(job)
        limits = job.min_gpus, self.limit(job)
        if learner.profile is None or (learner.min_gpus, learner.max_gpus) != limits:
            learner.min_gpus, learner.max_gpus = limits
            learner.make_profile(job.model)
        assert learner.profile is not None
        return learner.profile

    def imagined(self, job: LiveJob, gpus: GpuRange) -> Profile:
        """The profile that it would have with this range."""
        changed = replace(job, min_gpus=gpus.min, max_gpus=gpus.max)
        if job.resize is Resize.NEVER:
            return self.profile(changed)
        learner = copy.copy(self.learner(job))
        learner.min_gpus, learner.max_gpus = gpus.min, self.limit(changed)
        return learner.make_profile(job.model)

    def learner(self, job: LiveJob) -> Learner:
        found = self._learners.get(job.id)
        if found is None:
            found = self._learners[job.id] = Learner(
                speed=self._speed(job.model),
                min_gpus=job.min_gpus,
                max_gpus=self.limit(job),
                iterations=job.spec["iterations"],
                expected_s=job.spec["expected_s"],
                requested_gpus=job.requested_gpus,
                target_loss=job.spec["target_loss"],
                nodes=self._most_nodes,
                is_live=job.resize is Resize.LIVE,
                step=float(job.progress.step or 0),
                total_steps=job.progress.total_steps,
            )
        return found

    def limit(self, job: LiveJob) -> int:
        """The most GPUs it may have: by its range, and by the cluster."""
        most = min(job.max_gpus, max(self._scheduler().cluster.total_gpus, job.min_gpus))
        return job.range.floor(most)

    def _speed(self, model: str) -> SpeedEstimator:
        found = self._speeds.get(model)
        if found is None:
            saved = self._store.knowledge(model)
            most = self._scheduler().cluster.total_gpus
            per_node = max((n.gpus for n in self._nodes), default=1)
            if saved is not None:
                saved |= {"max_gpus": most, "gpus_per_node": per_node}
                found = SpeedEstimator.from_dict(saved)
            else:
                found = SpeedEstimator(most, per_node)
            self._speeds[model] = found
        return found

    @property
    def _most_nodes(self) -> int:
        return min(max(len(self._nodes), 1), MOST_NODES)

    def nodes_changed(self) -> None:
        """Make all profiles anew, for as many GPUs as the cluster has now. What was measured stays."""
        most = self._scheduler().cluster.total_gpus
        per_node = max((n.gpus for n in self._nodes), default=1)
        for model, speed in self._speeds.items():
            grown = speed.to_dict() | {"max_gpus": most, "gpus_per_node": per_node}
            self._speeds[model] = SpeedEstimator.from_dict(grown)
        for job_id, learner in self._learners.items():
            if job_id in self._jobs:
                learner.speed = self._speed(self._jobs[job_id].model)
                learner.nodes, learner.profile = self._most_nodes, None

    def estimator(self, model: str) -> SpeedEstimator:
        """What jobs with this model word taught of their speed."""
        return self._speed(model)

    def measured(
        self, job: LiveJob, gpus: int, nodes: int, step_s: float, gpu_type: str | None = None
    ) -> None:
        """A step of a live job took so long, on the type of its target unless another is given."""
        learner, gpu_type = self.learner(job), gpu_type or job.gpu_type
        if gpu_type is not None and learner.observe(gpus, nodes, gpu_type, step_s):
            self._learned(job.model, learner.speed)

    def worker_failed(self, job: LiveJob) -> None:
        """A worker of the job failed: if it is measured at another size, it may be for that size."""
        exploration = self._scheduler().exploration
        if exploration is not None and exploration.trial_of(job.id) is not None:
            self._take_in(WorkerFailed(job.id))

    def _learned(self, model: str, speed: SpeedEstimator) -> None:
        """Give all jobs of the model their new profile, and record what it is made from.

        After a restart the profiles are made from the record, so they must not depend on anything else.
        """
        self._outbox.knowledge(model, speed.to_dict())
        for job in self._jobs.values():
            if job.model == model and job.resize is not Resize.NEVER:
                profile = self.learner(job).make_profile(model)
                if job.id in self._scheduler().jobs:
                    self._take_in(Measured(job.id, profile))

    def tell_length(self, job: LiveJob) -> None:
        """Tell the scheduler how much is left, and how fast it goes."""
        scheduler = self._scheduler()
        if job.id in scheduler.view:
            speed = self.speed_now(job) if self._knows_type(job) else 0.0
            scheduler.observe(job.id, self._steps_left(job), speed, self._now_s())

    def _knows_type(self, job: LiveJob) -> bool:
        """Whether its speed is its own on its type, not taken from another type: policies compare the types by it."""
        if job.resize is not Resize.LIVE or len(self._scheduler().cluster.gpu_types) < 2:
            return True
        return self.learner(job).is_measured(job.gpus, job.gpu_type or "")

    def _steps_left(self, job: LiveJob) -> float:
        if job.resize is Resize.NEVER:
            expected_s = job.spec["expected_s"] or ASSUMED_LENGTH_S
            return max(float(expected_s) - self.running_s(job), 0.0)
        return self.length(job).steps

    def length(self, job: LiveJob) -> Length:
        """Steps left of a job that can be resized, and where that comes from."""
        return self.learner(job).length(self._speed_at(job, job.requested_gpus))

    def running_s(self, job: LiveJob) -> float:
        """Time it has had GPUs, up to now."""
        runs = job.life.gpus or job.life.state is JobState.RUNNING
        since = max(self._now_s() - job.life.settled_s, 0.0) if runs else 0.0
        return job.life.running_s + since

    def left_s(self, job: LiveJob) -> float | None:
        """Seconds until it ends at its present share; None where that is not known."""
        if job.resize is not Resize.LIVE:
            total_s = job.spec["expected_s"] or (job.needs or {}).get("total_s")
            return None if total_s is None else max(float(total_s) - self.running_s(job), 0.0)
        length, speed = self.length(job), self.speed_now(job)
        return None if length.assumed or not speed > 0 else length.steps / speed

    def _speed_at(self, job: LiveJob, gpus: int) -> float:
        gpu_type = job.gpu_type or self._scheduler().cluster.gpu_types[0]
        return self.profile(job).speed(gpu_type, gpus)

    def speed_now(self, job: LiveJob) -> float:
        """Steps per second at the share it has."""
        if job.colocated and job.life.state is JobState.RUNNING:
            return self._speed_at(job, 1)
        return self._speed_at(job, job.gpus) if job.gpus else 0.0

    def speedup(self, job: LiveJob) -> tuple[float | None, bool]:
        """Its speed over that of one GPU, and whether it was measured rather than estimated.

        None if it is not known, as while its workers start.
        """
        if job.resize is Resize.NEVER or not job.gpus:
            return None, False
        # While a live job is resized, workers on some of its GPUs do not train yet, or no more.
        gpus = job.size if job.resize is Resize.LIVE and job.size else job.gpus
        one, now = self._speed_at(job, 1), self._speed_at(job, gpus)
        learner, gpu_type = self.learner(job), job.gpu_type or ""
        measured = all(learner.is_measured(size, gpu_type) for size in (1, gpus))
        return (now / one, measured) if one > 0 and now > 0 else (None, False)

    def remaining(self, job: LiveJob) -> Estimate:
        """How long it needs yet, at its present share (at the requested one if it has none)."""
        gpus = job.gpus or job.requested_gpus
        if job.resize is Resize.NEVER:
            if job.spec["expected_s"] is None:
                return Estimate(unknown="nothing is known of its length: give `expected_s`")
            left = self._steps_left(job)
            return Estimate(low_s=0.5 * left, high_s=2.0 * left, basis="what its owner expects")
        speed = self._speed_at(job, gpus)
        return self.learner(job).remaining(speed, self._speed_at(job, job.requested_gpus))

    def in_full(self, job: LiveJob, reason: CoreReason) -> Reason:
        """Add what the scheduler does not know: the owner's maximum, and where an estimated length comes from.

        The scheduler's maximum is the share at which the job is fastest, and its lengths may be assumptions.
        """
        full = Reason.of(reason)
        if "remaining_s" in full.evidence:
            left = self.remaining(job)
            full.evidence["remaining_by"] = left.basis or f"an assumption: {left.unknown}"
        useful = full.evidence.get("max_gpus")
        if useful is not None and useful != job.max_gpus:
            full.evidence |= {"max_gpus": job.max_gpus, "useful_gpus": useful}
        return full

    def keep(self, job: LiveJob) -> None:
        """The job is over; what it taught stays."""
        learner = self._learners.pop(job.id, None)
        if learner is None or not learner.speed.gpu_types():
            return
        state = learner.speed.to_dict()
        with self._store.change(self._now_s()) as change:
            change.put_knowledge(job.model, state)


def _seconds(at: str | None) -> float | None:
    """A time on record as seconds since 1970."""
    return None if at is None else datetime.fromisoformat(at).timestamp()
