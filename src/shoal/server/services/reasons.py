"""Why a job has what it has: the reason, who has the rest, when that may change, and what would change it now."""

from __future__ import annotations

from typing import Any

from shoal.core.plan import Outcome
from shoal.core.words import counted, listed
from shoal.scheduler.explain import NO_GAIN
from shoal.server.api import models as m
from shoal.server.api.models import JobState, Resize
from shoal.server.loop.clock import as_time
from shoal.server.loop.conductor import Conductor
from shoal.server.loop.live_job import LEAVING, MAX_REFUSED, LiveJob, job_ref
from shoal.server.loop.news import DONE
from shoal.server.services.whatif import WhatIf

MOST_AHEAD, MOST_NAMED = 5, 3


class Reasons:
    def __init__(self, conductor: Conductor) -> None:
        self.c = conductor
        self.whatif = WhatIf(conductor)

    # -- the reason --------------------------------------------------------------------------------

    def outcome(self, job: LiveJob) -> Outcome | None:
        scheduler = self.c.scheduler
        if job.id not in scheduler.view and job.id not in scheduler.held:
            return None
        return scheduler.outcome(job.id, self.c.now_s())

    def reason(self, job: LiveJob, may_see: bool = False) -> m.Reason | None:
        """Why it does not have all it could use; None if it has, or is over."""
        if job.life.state is JobState.STOPPING:
            return None
        if job.ending is not None:
            return self._ends(job)
        if job.life.state is JobState.PAUSED:
            text = f"{job.life.message or 'its owner holds it'}; `shoal resume {job.name}` lets it go on"
            return m.Reason(code="Held", sentence=text)
        lacks = job.target_gpus > job.gpus
        given = f"it was given {counted(job.target_gpus, 'GPU')}"
        if lacks and job.id in self.c.unmet:
            return self._waits_for_release(job, may_see)
        if job.target_gpus and job.workers and all(w.state == LEAVING for w in job.workers.values()):
            old = counted(len(job.workers), "old worker has", "old workers have")
            text = f"{given} and begins when its {old} ended"
            return m.Reason(code="WaitingForRelease", sentence=text, evidence={"leaving": len(job.workers)})
        if lacks and job.refused >= MAX_REFUSED:
            text = f"its last {job.refused} new workers failed, so no more are tried until its share changes"
            return m.Reason(code="Misconfigured", sentence=text, evidence={"failed_workers": job.refused})
        outcome = self.outcome(job)
        if outcome is None:
            return m.Reason(code="PendingEvaluation", sentence="no decision has been made since it arrived")
        if outcome.reason is not None:
            return self.c.sharing.explain(job, self.c.profiles.in_full(job, outcome.reason), may_see)
        if lacks:
            text = f"{given}; its new workers prepare"
            return m.Reason(code="PendingEvaluation", sentence=text, evidence={"gpus": job.gpus})
        if not job.gpus:
            text = "what happened to it last is about to be decided on"
            return m.Reason(code="PendingEvaluation", sentence=text)
        return self._has_enough(job)

    def _ends(self, job: LiveJob) -> m.Reason | None:
        """Its outcome is certain, and its last processes are about to end."""
        if job.ending == DONE:
            waits = job.life.state is JobState.PENDING
            text = "its work is done, and it is over in a moment"
            return m.Reason(code="PendingEvaluation", sentence=text) if waits else None
        left = counted(len(job.workers), "process has", "processes have")
        again = job.life.restarts < job.spec["max_restarts"]
        then = "is started again" if again else "is over"
        text = f"it failed ({job.ending}) and {then} when its {left} ended"
        return m.Reason(code="PendingEvaluation", sentence=text, evidence={"leaving": len(job.workers)})

    def _has_enough(self, job: LiveJob) -> m.Reason | None:
        """It has all that decisions reckon with, and maybe less than its owner allows."""
        elastic = self.c.scheduler.policy.elastic and job.resize is not Resize.NEVER
        most = min(job.max_gpus, self.c.cluster.total_gpus)
        if not elastic or job.gpus >= most:
            return None
        text = f"it has {counted(job.gpus, 'GPU')}; by its measured speed more would not make it faster"
        evidence: dict[str, float | int | str] = {"useful_gpus": job.gpus, "max_gpus": job.max_gpus}
        return m.Reason(code="NotWorthIt", sentence=text, evidence=evidence)

    def _waits_for_release(self, job: LiveJob, may_see: bool) -> m.Reason:
        if job.lodges:
            text = "it was given a GPU of its own, and stays a guest where it is until that GPU is free"
            return m.Reason(code="WaitingForRelease", sentence=text, evidence={"given_gpus": 1})
        holders = [j for j in self.c.jobs.values() if j.id != job.id and j.gpus > j.target_gpus]
        names = dict.fromkeys(name_of(j, may_see or j.user == job.user) for j in holders)
        who = listed(list(names)[:MOST_NAMED], len(names)) or "others"
        has = "has" if len(names) == 1 else "have"
        text = f"it was given {counted(job.target_gpus, 'GPU')} and waits until {who} {has} let them go"
        evidence: dict[str, float | int | str] = {"gpus": job.gpus, "given_gpus": job.target_gpus}
        return m.Reason(code="WaitingForRelease", sentence=text, evidence=evidence)

    # -- the whole answer --------------------------------------------------------------------------

    def why(self, job: LiveJob, may_see: bool) -> m.Why:
        """The answer to `shoal why`; `may_see`: the asker may see all jobs."""
        reason = self.reason(job, may_see)
        waits = job.gpus == 0 and job.life.state is JobState.PENDING
        grows = bool(job.gpus) and reason is not None and _could_use_more(reason)
        ahead = self._ahead(job) if waits else self._holders(job) if grows else []
        return m.Why(
            job=job_ref(job),
            reason=reason,
            sentence=self._sentence(job, reason, may_see),
            policy=self.c.policy_name,
            ahead=[job_ref(j, may_see or j.user == job.user) for j in ahead[:MOST_AHEAD]],
            ahead_total=len(ahead),
            starts_in=self._starts_in(job) if waits else None,
            grows_in=self._grows_in(job, may_see) if grows else None,
            could=self.whatif.could(job, may_see) if waits or grows or not job.gpus else [],
            last_decision=self.c.scheduler.plans - 1 if self.c.scheduler.plans else None,
            decided_at=as_time(self.c.decided_s),
        )

    def over(self, job: m.Job) -> m.Why:
        """Of a job that is over."""
        told = f": {job.message}" if job.message else ""
        ref = m.JobRef(
            id=job.id, name=job.name, user=job.user, state=job.state, gpus=0, target_gpus=0,
            min_gpus=job.min_gpus, max_gpus=job.max_gpus,
        )  # fmt: skip
        is_ = "was " if job.state is JobState.CANCELLED else ""
        sentence = f"{job.name} {is_}{job.state.value}{told}"
        return m.Why(job=ref, reason=None, sentence=sentence, policy=self.c.policy_name)

    def _sentence(self, job: LiveJob, reason: m.Reason | None, may_see: bool) -> str:
        state = job.life.state.value
        if reason is not None:
            return f"{job.name} is {state}: {reason.sentence}"
        if job.life.state is JobState.STOPPING:
            return f"{job.name} is being cancelled; {counted(len(job.workers), 'worker is', 'workers are')} ending"
        if job.ending == DONE:
            return f"{job.name} is done; {counted(len(job.workers), 'worker is', 'workers are')} ending"
        others = self.c.sharing.with_whom(job, may_see)
        shared = f", which it shares with {others}" if others else ""
        return f"{job.name} is {state} and has all it can use: {counted(job.gpus, 'GPU')}{shared}"

    def _holders(self, job: LiveJob) -> list[LiveJob]:
        """Others that have GPUs or were given some, the largest first."""
        others = [j for j in self.c.jobs.values() if j.id != job.id and (j.gpus or j.target_gpus)]
        return sorted(others, key=lambda j: -max(j.gpus, j.target_gpus))

    def _before(self, job: LiveJob) -> list[LiveJob]:
        """Those that came before it and wait too."""
        return [
            j
            for j in self.c.jobs.values()
            if j.id < job.id and not j.gpus and not j.target_gpus and j.life.state is JobState.PENDING
        ]

    def _ahead(self, job: LiveJob) -> list[LiveJob]:
        return self._holders(job) + self._before(job)

    # -- when --------------------------------------------------------------------------------------

    def _starts_in(self, job: LiveJob) -> m.Estimate:
        """The sooner of: its turn by the policy, if nothing happens; enough GPUs let go by jobs that end."""
        ends, turn_s = self._when_others_end(job), self.whatif.turn_in_s(job)
        if turn_s is None:
            return ends
        if ends.high_s is not None and ends.high_s <= turn_s:
            return ends
        soonest = turn_s if ends.low_s is None else min(ends.low_s, turn_s)
        basis = f"policy {self.c.policy_name} shares out anew by then, if no job comes"
        return m.Estimate(low_s=soonest, high_s=turn_s, basis=basis)

    def _when_others_end(self, job: LiveJob) -> m.Estimate:
        need = job.min_gpus if self.c.scheduler.policy.elastic else job.requested_gpus
        before = self._before(job)
        need += sum(j.min_gpus for j in before)
        ends = [(j, self.c.profiles.remaining(j)) for j in self.c.jobs.values() if j.target_gpus]
        free = self.c.scheduler.supply.total_gpus - sum(j.target_gpus for j, _ in ends)
        known = [(j, e) for j, e in ends if e.unknown is None]
        times = {}
        for bound in ("low_s", "high_s"):
            have, times[bound] = free, None
            for other, left in sorted(known, key=lambda je: getattr(je[1], bound)):
                have += other.target_gpus
                if have >= need:
                    times[bound] = getattr(left, bound)
                    break
        if times["low_s"] is None or times["high_s"] is None:
            unknown = len(ends) - len(known)
            if not unknown:
                return m.Estimate(unknown="no job runs whose end it could wait for")
            of = "the running job" if len(ends) == 1 else f"{unknown} of {len(ends)} running jobs"
            return m.Estimate(unknown=f"the remaining time of {of} is not known")
        basis = f"the remaining time of {counted(len(known), 'running job')}"
        if before:
            basis += f", and {counted(len(before), 'job')} waiting before it"
        if len(known) < len(ends):  # any of which may end this moment
            basis += f"; that of {len(ends) - len(known)} is not known"
            times["low_s"] = 0.0
        return m.Estimate(low_s=times["low_s"], high_s=times["high_s"], basis=basis)

    def _grows_in(self, job: LiveJob, may_see: bool) -> m.Estimate:
        """When the first of the others ends: its GPUs are shared out anew then."""
        holders = self._holders(job)
        ends = [(j, left) for j in holders if (left := self.c.profiles.remaining(j)).unknown is None]
        if not ends:
            unknown = "no other job has GPUs" if not holders else "when the others end is not known"
            return m.Estimate(unknown=unknown)
        first, left = min(ends, key=lambda je: je[1].high_s)
        basis = f"{name_of(first, may_see or first.user == job.user)} ends, by {left.basis}"
        return m.Estimate(low_s=left.low_s, high_s=left.high_s, basis=basis)


def name_of(job: LiveJob, may_see: bool) -> str:
    return job.name if may_see else f"a job of {job.user}"


def _could_use_more(reason: m.Reason) -> bool:
    """Whether it lacks GPUs that others have, rather than workers that prepare or any use for more."""
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
