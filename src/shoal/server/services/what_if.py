"""What would happen if: try a change on a copy of the scheduler, whose decisions are not carried out."""

from __future__ import annotations

import copy
import math
import shlex
from collections.abc import Iterator
from dataclasses import replace

from shoal.core.events import Cancelled, Capped, Event, Rescaled, Submitted, Timer
from shoal.core.job import GpuRange
from shoal.core.job import Job as CoreJob
from shoal.core.profile import ANY_TYPE, Profile, SpeedCurve
from shoal.core.words import counted, listed
from shoal.knowledge.size_search import Autoscale, SizeSearch
from shoal.scheduler.scheduler import Scheduler
from shoal.server.api import models as m
from shoal.server.api.models import JobState, Resize
from shoal.server.loop.learning import assumed_speed, fixed_profile
from shoal.server.loop.live_job import LiveJob, job_ref
from shoal.server.loop.profiles import Profiles
from shoal.server.services.loop_view import LoopView
from shoal.server.services.reasons import shown_name

#: Other jobs to try without, and turns of the policy to look ahead.
MOST_TRIED, MOST_TURNS = 5, 60


class WhatIf:
    def __init__(self, loop: LoopView, profiles: Profiles) -> None:
        self._loop, self._profiles = loop, profiles

    def could(self, job: LiveJob, may_see: bool = False) -> list[m.CouldDo]:
        """The smallest changes, one of each kind, that would start a waiting job or grow a running one now."""
        if job.life.state is JobState.PAUSED:
            text = f"resume it: shoal resume {shlex.quote(job.name)}"
            text += "" if self._would_start(job) else " (it would wait for GPUs then)"
            return [m.CouldDo(change="resume", value=job.name, sentence=text)]
        if job.gpus:
            return self._larger(job, may_see)
        if job.life.state is not JobState.PENDING or job.target_gpus:
            return []
        found = [*self._smaller(job)]
        if job.spec["gpu_types"] and self._would_start(job, gpu_types=()):
            text = "on any GPU type it would start now"
            found.append(m.CouldDo(change="gpu_types", value="any", sentence=text))
        return found + self._without_another(job)

    def _smaller(self, job: LiveJob) -> Iterator[m.CouldDo]:
        elastic = self._loop.scheduler.policy.elastic
        size = self._smaller_that_starts(job)
        if size is None:
            return
        fixed = job.resize is Resize.NEVER or job.min_gpus == job.max_gpus
        option = f"--pin {size}" if fixed else f"--min {size}" if elastic else f"--max {size}"
        gpus = counted(size, "GPU")
        if elastic and not fixed:
            text = f"with a minimum of {gpus} instead of {job.min_gpus} it would start now"
        else:
            text = (
                f"with {gpus} instead of {job.min_gpus if elastic else job.requested_gpus} it would start now"
            )
        yield m.CouldDo(
            change="min_gpus" if elastic or fixed else "requested_gpus",
            value=size,
            sentence=f"{text}: shoal scale {shlex.quote(job.name)} {option}",
        )

    def _without_another(self, job: LiveJob) -> list[m.CouldDo]:
        """The smallest other job of its owner whose pause would start it."""
        mine = [
            j for j in self._loop.jobs.values() if j.user == job.user and j.id != job.id and j.target_gpus
        ]
        for other in sorted(mine, key=lambda j: (j.target_gpus, -j.id))[:MOST_TRIED]:
            if self._would_start(job, without=other.id):
                text = f"if {other.name} released its GPUs it would start now: shoal pause {shlex.quote(other.name)}"
                return [m.CouldDo(change="finish_job", value=other.name, sentence=text)]
        return []

    def _larger(self, job: LiveJob, may_see: bool) -> list[m.CouldDo]:
        """Whether a minimum of one GPU more would be granted, and which jobs would shrink."""
        size = job.target_gpus + 1
        if job.resize is Resize.NEVER or size > job.max_gpus or job.id not in self._loop.scheduler.view:
            return []
        scheduler = self._copy()
        plan = scheduler.step(self._loop.now_s(), [Rescaled(job.id, size, job.max_gpus)])
        if int(scheduler.view.gpus[scheduler.view.row(job.id)]) < size:
            return []
        smaller = [
            f"{shown_name(other, may_see or other.user == job.user)} "
            f"would have {command.share.gpus} instead of {other.target_gpus}"
            for command in plan.commands
            if (other := self._loop.jobs.get(command.job)) is not None
            and command.share.gpus < other.target_gpus
        ]
        cost = f" ({listed(smaller[:MOST_TRIED])})" if smaller else ""
        how = f"shoal scale {shlex.quote(job.name)} --min {size}"
        text = f"with a minimum of {size} GPUs it would have them now{cost}: {how}"
        return [m.CouldDo(change="min_gpus", value=size, sentence=text)]

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
            if scheduler.view.gpus[scheduler.view.row(job.id)]:
                return now_s - begin_s
            if not now_s < wake_s < math.inf:
                return None
            now_s = wake_s
        return None

    def _smaller_that_starts(self, job: LiveJob) -> int | None:
        size = job.min_gpus if self._loop.scheduler.policy.elastic else job.requested_gpus
        low, high, best = 1, size - 1, None
        while low <= high:  # a smaller job is never harder to start, so a binary search finds the largest
            middle = (low + high) // 2
            if self._would_start(job, min_gpus=middle):
                best, low = middle, middle + 1
            else:
                high = middle - 1
        return best

    def _would_start(
        self,
        job: LiveJob,
        min_gpus: int | None = None,
        gpu_types: tuple[str, ...] | None = None,
        without: int | None = None,
    ) -> bool:
        """Whether the job with these changes would get GPUs now; `without`: without this other job."""
        scheduler = self._copy()
        core, profile = self._profiles.of(job)
        low = min_gpus or core.gpus.min
        high = max(low, core.gpus.max) if job.resize is not Resize.NEVER else low
        if job.resize is Resize.NEVER:
            profile = fixed_profile("what-if", low)
        changed = replace(
            core,
            gpus=GpuRange(low, high),
            requested_gpus=low if min_gpus else core.requested_gpus,
            gpu_types=core.gpu_types if gpu_types is None else gpu_types,
        )
        now_s = self._loop.now_s()
        new_id = self._next_id()
        if job.id in scheduler.jobs:
            scheduler.take_in(Cancelled(job.id), now_s)
        if without is not None:
            scheduler.take_in(Cancelled(without), now_s)
        scheduler.step(now_s, [Submitted(new_id, changed, profile)])
        return scheduler.outcome(new_id, now_s).share.gpus > 0

    def _copy(self) -> Scheduler:
        """A scheduler to try changes on."""
        s = self._loop.scheduler
        # Immutable values are shared: with many jobs they are most of the memory.
        same = (s.cluster, s.supply, *s.jobs.values(), *s.profiles.values(), *s.placements.values())
        return copy.deepcopy(s, {id(value): value for value in same})

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
            requested_gpus=spec.requested_gpus or max(min(gpus.max, total), gpus.min),
            user=user,
            iterations=spec.iterations or 3600.0,
            gpu_types=tuple(spec.gpu_types),
            weight=spec.weight,
        )
        return job, profile
