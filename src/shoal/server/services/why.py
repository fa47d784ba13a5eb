"""The answer to `shoal why`: the reason, who has the GPUs, when that may change, and what would change it now."""

from __future__ import annotations

from typing import Any

from shoal.core.words import counted
from shoal.scheduler.explain import NO_GAIN
from shoal.server.api import models as m
from shoal.server.api.models import JobState
from shoal.server.loop.clock import as_time
from shoal.server.loop.coordinator_events import DONE
from shoal.server.loop.live_job import LiveJob, job_ref
from shoal.server.loop.profiles import Profiles
from shoal.server.loop.sharing.explanations import Explanations
from shoal.server.services.deadline import verdict
from shoal.server.services.loop_view import LoopView
from shoal.server.services.reasons import Reasons, shown_name
from shoal.server.services.what_if import WhatIf

MOST_AHEAD = 5
#: Reasons that have nothing to do with the GPUs of others.
_CONDITIONS = ("NotBefore", "Dependency", "ExceedsLimit", "QuotaExhausted")


def ref_of(job: m.Job) -> m.JobRef:
    """A job that is over, in an answer about it."""
    return m.JobRef(
        id=job.id, name=job.name, user=job.user, state=job.state, gpus=0, target_gpus=0,
        min_gpus=job.min_gpus, max_gpus=job.max_gpus, step_gpus=job.step_gpus,
    )  # fmt: skip


class Why:
    def __init__(
        self, loop: LoopView, profiles: Profiles, sharing: Explanations, reasons: Reasons, what_if: WhatIf
    ) -> None:
        self._loop, self._profiles, self._sharing = loop, profiles, sharing
        self._reasons, self._what_if = reasons, what_if

    def why(self, job: LiveJob, may_see: bool) -> m.Why:
        """Of an unfinished job. `may_see`: the asker may see all jobs, so they may be named."""
        reason = self._reasons.reason(job, may_see)
        waits = job.gpus == 0 and job.life.state is JobState.PENDING
        grows = bool(job.gpus) and reason is not None and _could_use_more(reason)
        conditioned = reason is not None and reason.code in _CONDITIONS
        ahead = self._ahead(job) if waits and not conditioned else self._holders(job) if grows else []
        starts_in = None
        if waits:
            starts_in = self._when_allowed(job, reason) if conditioned and reason else self._starts_in(job)
        return m.Why(
            job=job_ref(job),
            reason=reason,
            sentence=self._sentence(job, reason, may_see),
            policy=self._loop.policy_name,
            ahead=[job_ref(j, may_see or j.user == job.user) for j in ahead[:MOST_AHEAD]],
            ahead_total=len(ahead),
            starts_in=starts_in,
            grows_in=self._grows_in(job, may_see) if grows else None,
            could=self._what_if.could(job, may_see) if waits or grows or not job.gpus else [],
            deadline=self._deadline(job, starts_in),
            quantum=self._loop.scheduler.policy.quantum if (waits and not conditioned) or grows else None,
            last_decision=self._loop.scheduler.plans - 1 if self._loop.scheduler.plans else None,
            decided_at=as_time(self._loop.decided_s),
        )

    def over(self, job: m.Job) -> m.Why:
        """Of a job that has ended."""
        how = f": {job.message}" if job.message else ""
        is_ = "was " if job.state is JobState.CANCELLED else ""
        sentence = f"{job.name} {is_}{job.state.value}{how}"
        return m.Why(job=ref_of(job), reason=None, sentence=sentence, policy=self._loop.policy_name)

    def _sentence(self, job: LiveJob, reason: m.Reason | None, may_see: bool) -> str:
        state = job.life.state.value
        if reason is not None:
            return f"{job.name} is {state}: {reason.sentence}"
        if job.life.state is JobState.STOPPING:
            return f"{job.name} is being cancelled; {counted(len(job.workers), 'worker is', 'workers are')} ending"
        if job.ending == DONE:
            return f"{job.name} is done; {counted(len(job.workers), 'worker is', 'workers are')} ending"
        others = self._sharing.with_whom(job, may_see)
        shared = f", which it shares with {others}" if others else ""
        return f"{job.name} is {state} and has all it can use: {counted(job.gpus, 'GPU')}{shared}"

    def _holders(self, job: LiveJob) -> list[LiveJob]:
        """Other jobs that hold GPUs or were given some, largest first."""
        others = [j for j in self._loop.jobs.values() if j.id != job.id and (j.gpus or j.target_gpus)]
        return sorted(others, key=lambda j: -max(j.gpus, j.target_gpus))

    def _before(self, job: LiveJob) -> list[LiveJob]:
        """Jobs that were submitted before it and wait too."""
        return [
            j
            for j in self._loop.jobs.values()
            if j.id < job.id and not j.gpus and not j.target_gpus and j.life.state is JobState.PENDING
        ]

    def _ahead(self, job: LiveJob) -> list[LiveJob]:
        return self._holders(job) + self._before(job)

    def _deadline(self, job: LiveJob, starts_in: m.Estimate | None) -> str | None:
        """Whether its deadline will be met; None without one."""
        core = self._loop.scheduler.jobs.get(job.id)
        if core is None or core.deadline_s is None:
            return None
        return verdict(core.deadline_s - self._loop.now_s(), starts_in, self._profiles.remaining(job))

    def _when_allowed(self, job: LiveJob, reason: m.Reason) -> m.Estimate:
        """When something besides GPUs lets it run: a time, the end of another job, or a limit."""
        for key, basis in (
            ("wait_s", "its owner lets it start then"),
            ("frees_in_s", "its limit frees up then"),
        ):
            if key in reason.evidence:
                return m.Estimate(low_s=float(reason.evidence[key]), basis=basis)
        other = self._loop.jobs.get(int(reason.evidence.get("after", 0)))
        if other is None:
            return m.Estimate(unknown="it does not depend on GPUs")
        left = self._profiles.remaining(other)
        if left.unknown is not None:
            return m.Estimate(unknown=f"when {other.name} ends is not known: {left.unknown}")
        return m.Estimate(low_s=left.low_s, basis=f"{other.name} ends, by {left.basis}")

    # -- when --------------------------------------------------------------------------------------

    def _starts_in(self, job: LiveJob) -> m.Estimate:
        """The sooner of two: the policy gives it a turn although nothing happens; enough running jobs end."""
        ends, turn_s = self._when_others_end(job), self._what_if.turn_in_s(job)
        if turn_s is None:
            return ends
        if ends.high_s is not None and ends.high_s <= turn_s:
            return ends
        soonest = turn_s if ends.low_s is None else min(ends.low_s, turn_s)
        basis = f"policy {self._loop.policy_name} allocates anew by then if no job arrives"
        return m.Estimate(low_s=soonest, high_s=turn_s, basis=basis)

    def _when_others_end(self, job: LiveJob) -> m.Estimate:
        need = job.min_gpus if self._loop.scheduler.policy.elastic else job.requested_gpus
        before = self._before(job)
        need += sum(j.min_gpus for j in before)
        ends = [(j, self._profiles.remaining(j)) for j in self._loop.jobs.values() if j.target_gpus]
        free = self._loop.scheduler.supply.total_gpus - sum(j.target_gpus for j, _ in ends)
        known = [(j, e) for j, e in ends if e.unknown is None]
        low_s = _when_released(need - free, [(j.target_gpus, e.low_s or 0.0) for j, e in known])
        high_s = _when_released(need - free, [(j.target_gpus, e.high_s or 0.0) for j, e in known])
        if low_s is None or high_s is None:
            unknown = len(ends) - len(known)
            if not unknown:
                return m.Estimate(unknown="no job runs whose end it could wait for")
            of = "the running job" if len(ends) == 1 else f"{unknown} of {len(ends)} running jobs"
            return m.Estimate(unknown=f"the remaining time of {of} is not known")
        basis = f"the remaining time of {counted(len(known), 'running job')}"
        if before:
            basis += f", and {counted(len(before), 'job')} waiting before it"
        if len(known) < len(ends):  # a job of unknown length may end at any time
            basis += f"; that of {len(ends) - len(known)} is not known"
            low_s = 0.0
        return m.Estimate(low_s=low_s, high_s=high_s, basis=basis)

    def _grows_in(self, job: LiveJob, may_see: bool) -> m.Estimate:
        """When the first of the others ends: its GPUs are then allocated anew."""
        holders = self._holders(job)
        ends = [(j, left) for j in holders if (left := self._profiles.remaining(j)).unknown is None]
        if not ends:
            unknown = "no other job has GPUs" if not holders else "when the others end is not known"
            return m.Estimate(unknown=unknown)
        first, left = min(ends, key=lambda je: je[1].high_s or 0.0)
        basis = f"{shown_name(first, may_see or first.user == job.user)} ends, by {left.basis}"
        return m.Estimate(low_s=left.low_s, high_s=left.high_s, basis=basis)


def _when_released(gpus: int, ends: list[tuple[int, float]]) -> float | None:
    """When so many GPUs are free, if jobs end as in `ends`: (GPUs, seconds until then). None: never."""
    for freed, end_s in sorted(ends, key=lambda end: end[1]):
        gpus -= freed
        if gpus <= 0:
            return end_s
    return None


def _could_use_more(reason: m.Reason) -> bool:
    """Whether the job could use GPUs that others hold. It could not if it only waits for its own workers."""
    if reason.code not in (
        "NotWorthIt",
        "BehindOthers",
        "QuotaExhausted",
        "WaitingForCapacity",
        "Fragmented",
    ):
        return False
    if "autoscaler_gpus" in reason.evidence:
        return False
    gain: Any = reason.evidence.get("next_gpu_gain")
    return (gain is None or gain >= NO_GAIN) and "free_gpus" in reason.evidence
