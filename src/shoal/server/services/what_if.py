"""What would happen if: try a change on a copy of the scheduler, whose decisions are not carried out."""

from __future__ import annotations

import copy
import math
import shlex
from collections.abc import Iterator
from dataclasses import replace

from shoal.core.errors import ShoalError
from shoal.core.events import Cancelled, Capped, Event, Held, Rescaled, Submitted, Timer
from shoal.core.job import Job as CoreJob
from shoal.core.profile import ANY_TYPE, Profile, SpeedCurve
from shoal.core.words import counted, listed
from shoal.knowledge.size_search import Autoscale, SizeSearch
from shoal.knowledge.speed_prior import assumed_speed
from shoal.scheduler.scheduler import Scheduler
from shoal.server.api import models as m
from shoal.server.api.models import JobState, Resize
from shoal.server.loop.learning import fixed_profile
from shoal.server.loop.live_job import LiveJob, job_ref
from shoal.server.loop.profiles import Profiles
from shoal.server.services.engine_view import EngineView
from shoal.server.services.loop_view import LoopView
from shoal.server.services.reasons import shown_name
from shoal.server.services.sizes import new_size

#: Other jobs to try without, and turns of the policy to look ahead.
MOST_TRIED, MOST_TURNS = 5, 60


class WhatIf:
    def __init__(self, loop: LoopView, profiles: Profiles, engine: EngineView) -> None:
        self._loop, self._profiles, self._engine = loop, profiles, engine

    def could(self, job: LiveJob, may_see: bool = False) -> list[m.CouldDo]:
        """The smallest changes, one of each kind, that would start a waiting job or grow a running one now.

        Each was tried: the command is accepted, and the scheduler then gives the job GPUs.
        """
        if job.life.state is JobState.PAUSED:
            text = f"resume it: shoal resume {self._called(job)}"
            text += "" if self._gpus_after(job, Held(job.id, False)) else " (it would wait for GPUs then)"
            return [m.CouldDo(change="resume", value=job.name, sentence=text)]
        if job.again_s is not None:
            return []  # it starts by itself, and nothing that its owner could change starts it sooner
        if job.gpus:
            return self._larger(job, may_see)
        if job.life.state is not JobState.PENDING or job.target_gpus:
            return []
        found = [*self._smaller(job)]
        if job.spec["gpu_types"] and self._would_start_on_any_type(job):
            text = "on any GPU type it would start now: submit it without gpu_types"
            found.append(m.CouldDo(change="gpu_types", value="any", sentence=text))
        return found + self._without_another(job)

    def _called(self, job: LiveJob) -> str:
        """The job in a command: its name, or its number if another job has the same name."""
        same = [j for j in self._loop.jobs.values() if j.name == job.name]
        return shlex.quote(job.name) if len(same) == 1 else str(job.id)

    def _smaller(self, job: LiveJob) -> Iterator[m.CouldDo]:
        elastic = self._loop.scheduler.policy.elastic
        fixed = job.resize is Resize.NEVER or job.min_gpus == job.max_gpus
        bound = "pin" if fixed else "min" if elastic else "max"
        size = self._smaller_that_starts(job, bound)
        if size is None:
            return
        gpus = counted(size, "GPU")
        if bound == "min":
            text = f"with a minimum of {gpus} instead of {job.min_gpus} it would start now"
        else:
            now = job.min_gpus if elastic else job.requested_gpus
            text = f"with {gpus} instead of {now} it would start now"
        yield m.CouldDo(
            change="min_gpus" if elastic or fixed else "requested_gpus",
            value=size,
            sentence=f"{text}: shoal scale {self._called(job)} --{bound} {size}",
        )

    def _without_another(self, job: LiveJob) -> list[m.CouldDo]:
        """The smallest other job of its owner whose pause would start it."""
        mine = [
            j for j in self._loop.jobs.values() if j.user == job.user and j.id != job.id and j.target_gpus
        ]
        for other in sorted(mine, key=lambda j: (j.target_gpus, -j.id))[:MOST_TRIED]:
            if self._gpus_after(job, Held(other.id, True)):
                how = f"shoal pause {self._called(other)}"
                text = f"if {other.name} released its GPUs it would start now: {how}"
                return [m.CouldDo(change="finish_job", value=other.name, sentence=text)]
        return []

    def _larger(self, job: LiveJob, may_see: bool) -> list[m.CouldDo]:
        """Whether a minimum of one step more would be granted, and which jobs would shrink."""
        size = job.target_gpus + job.step_gpus
        scaled = self._scaled(job, "min", size) if size <= job.max_gpus else None
        if scaled is None or job.id not in self._loop.scheduler.view:
            return []
        scheduler = self._copy()
        plan = scheduler.step(self._loop.now_s(), [scaled])
        if scheduler.outcome(job.id, self._loop.now_s()).share.gpus < size:
            return []
        smaller = [
            f"{shown_name(other, may_see or other.user == job.user)} "
            f"would have {command.share.gpus} instead of {other.target_gpus}"
            for command in plan.commands
            if (other := self._loop.jobs.get(command.job)) is not None
            and command.share.gpus < other.target_gpus
        ]
        cost = f" ({listed(smaller[:MOST_TRIED])})" if smaller else ""
        how = f"shoal scale {self._called(job)} --min {size}"
        text = f"with a minimum of {size} GPUs it would have them now{cost}: {how}"
        return [m.CouldDo(change="min_gpus", value=size, sentence=text)]

    def _scaled(self, job: LiveJob, bound: str, size: int) -> Rescaled | None:
        """The event of `shoal scale --BOUND SIZE`; None if that would be refused, or the autoscaler decides."""
        if job.spec.get("autoscale"):
            return None
        try:
            gpus, requested = new_size(
                job, m.Scale.model_validate({bound: size}), self._loop.scheduler.cluster, self._engine
            )
        except ShoalError:
            return None
        profile = self._profiles.imagined(job, gpus)
        return Rescaled(job.id, gpus.min, gpus.max, requested, profile)

    def _gpus_after(self, job: LiveJob, event: Event) -> int:
        """GPUs that the job would have right after this event."""
        scheduler, now_s = self._copy(), self._loop.now_s()
        if job.id not in scheduler.jobs:
            return 0
        scheduler.step(now_s, [event])
        return scheduler.outcome(job.id, now_s).share.gpus

    def turn_in_s(self, job: LiveJob) -> float | None:
        """Seconds until the policy gives it GPUs by itself: at the end of a quantum or lease, or at a new level.

        None if the policy decides only on events, or gives it none within the next turns.
        """
        if job.id not in self._loop.scheduler.view:
            return None
        scheduler, begin_s = self._copy(), self._loop.now_s()
        now_s = begin_s
        for _ in range(MOST_TURNS):
            wake_s = scheduler.step(now_s, [Timer()]).wake_s
            # A limit may take it out of the view meanwhile: a quota is used up, or its place in an array is taken.
            if job.id in scheduler.view and scheduler.view.gpus[scheduler.view.row(job.id)]:
                return now_s - begin_s
            if not now_s < wake_s < math.inf:
                return None
            now_s = wake_s
        return None

    def _smaller_that_starts(self, job: LiveJob, bound: str) -> int | None:
        size = job.min_gpus if self._loop.scheduler.policy.elastic else job.requested_gpus
        step = job.step_gpus
        low, high, best = 1, size // step - 1, None
        while low <= high:  # a smaller job is never harder to start, so a binary search finds the largest
            middle = (low + high) // 2
            scaled = self._scaled(job, bound, middle * step)
            if scaled is not None and self._gpus_after(job, scaled):
                best, low = middle, middle + 1
            else:
                high = middle - 1
        return best * step if best is not None else None

    def _would_start_on_any_type(self, job: LiveJob) -> bool:
        """Whether the job would get GPUs now if it were submitted without GPU types."""
        scheduler, now_s, new_id = self._copy(), self._loop.now_s(), self._next_id()
        core, profile = self._profiles.of(job)
        if job.id in scheduler.jobs:
            scheduler.take_in(Cancelled(job.id), now_s)
        scheduler.step(now_s, [Submitted(new_id, replace(core, gpu_types=()), profile)])
        return scheduler.outcome(new_id, now_s).share.gpus > 0

    def _copy(self) -> Scheduler:
        """A scheduler to try changes on."""
        s = self._loop.scheduler
        # Immutable values are shared: with many jobs they are most of the memory.
        same = (s.cluster, s.supply, *s.jobs.values(), *s.profiles.values(), *s.placements.values())
        made = copy.deepcopy(s, {id(value): value for value in (*same, s.exploration)})
        made.exploration = None  # what the policy would decide, without trials
        return made

    def _next_id(self) -> int:
        ids = [*self._loop.scheduler.jobs, *self._loop.jobs]
        return max(ids, default=0) + 1

    def plan(self, spec: m.JobSpec, user: str, may_see: bool) -> m.PlanOutcome:
        """What would happen if this job were submitted now."""
        scheduler, now_s, job_id = self._copy(), self._loop.now_s(), self._next_id()
        events: list[Event] = [Submitted(job_id, *self._imagined(spec, user, now_s))]
        if spec.autoscale:
            low = spec.range.min
            least = SizeSearch(Autoscale.parse(spec.autoscale), low, low).cap
            events.append(Capped(job_id, least.gpus, least.why))
        plan = scheduler.step(now_s, events)
        outcome = scheduler.outcome(job_id, now_s)
        changes = []
        for command in plan.commands:
            other = self._loop.jobs.get(command.job)
            if other is not None and command.share.gpus != other.target_gpus:
                ref = job_ref(other, may_see or other.user == user)
                changes.append(m.Change(job=ref, from_gpus=other.target_gpus, to_gpus=command.share.gpus))
        got, reason = outcome.share.gpus, outcome.reason
        shrunk = sum(c.to_gpus < c.from_gpus for c in changes)
        if got:
            sentence = f"it would start now with {counted(got, 'GPU')}"
            sentence += f"; {counted(shrunk, 'other job')} would shrink" if shrunk else ""
        else:
            sentence = f"it would wait: {reason.sentence}" if reason else "it would wait"
        return m.PlanOutcome(
            verdict="waits" if not got else "shrinks_others" if shrunk else "starts",
            gpus=got,
            reason=m.Reason.of(reason) if reason else None,
            sentence=sentence,
            changes=changes,
        )

    def _imagined(self, spec: m.JobSpec, user: str, now_s: float) -> tuple[CoreJob, Profile]:
        gpus, total = spec.range, self._loop.scheduler.cluster.total_gpus
        if spec.effective_resize is Resize.NEVER:
            profile = fixed_profile("what-if", gpus.max)
        else:
            curve = SpeedCurve(assumed_speed(min(gpus.max, total)))
            profile = Profile("what-if", {ANY_TYPE: {0: curve}})
        job = CoreJob(
            name=spec.name or "what-if",
            submit_s=now_s,
            gpus=gpus,
            requested_gpus=spec.requested_gpus or max(gpus.floor(min(gpus.max, total)), gpus.min),
            user=user,
            iterations=spec.iterations or 3600.0,
            gpu_types=tuple(spec.gpu_types),
            weight=spec.weight,
            priority=spec.priority,
            not_before_s=0.0 if spec.not_before is None else spec.not_before.timestamp(),
        )
        return job, profile
