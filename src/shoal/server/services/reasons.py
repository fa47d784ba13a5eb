"""Why a job does not have all the GPUs it could use."""

from __future__ import annotations

from shoal.core.plan import Outcome
from shoal.core.words import counted, listed
from shoal.server.api import models as m
from shoal.server.api.models import JobState, Resize
from shoal.server.loop.coordinator_events import DONE
from shoal.server.loop.live_job import LEAVING, LiveJob
from shoal.server.loop.profiles import Profiles
from shoal.server.loop.restarts import Cause, may_restart, rests_until_s
from shoal.server.loop.sharing.explanations import Explanations
from shoal.server.services.engine_view import EngineView, with_engine
from shoal.server.services.loop_view import LoopView
from shoal.server.services.node_reasons import with_nodes

MOST_NAMED = 3


class Reasons:
    def __init__(self, loop: LoopView, profiles: Profiles, sharing: Explanations, engine: EngineView) -> None:
        self._loop, self._profiles, self._sharing, self._engine = loop, profiles, sharing, engine

    def _outcome(self, job: LiveJob) -> Outcome | None:
        scheduler = self._loop.scheduler
        if job.id not in scheduler.jobs:
            return None
        return scheduler.outcome(job.id, self._loop.now_s())

    def reason(self, job: LiveJob, may_see: bool = False) -> m.Reason | None:
        """Why it does not have all the GPUs it could use; None if it has, or is over."""
        if job.life.state is JobState.STOPPING:
            return None
        if job.ending is not None:
            return self._ends(job)
        if job.life.state is JobState.PAUSED:
            text = f"{job.life.message or 'its owner holds it'}; `shoal resume {job.name}` continues it"
            return m.Reason(code="Held", sentence=text)
        if job.again_s is not None:
            return self._rests(job)
        if job.grows_s is not None:
            return self._adds_none(job)
        lacks = job.target_gpus > job.gpus
        given = f"it was given {counted(job.target_gpus, 'GPU')}"
        if job.id in self._loop.unmet and (lacks or job.resize is Resize.LIVE):
            return self._waits_for_release(job, may_see)
        if job.target_gpus and job.workers and all(w.state == LEAVING for w in job.workers.values()):
            old = counted(len(job.workers), "old worker has", "old workers have")
            text = f"{given} and begins when its {old} ended"
            return m.Reason(code="WaitingForRelease", sentence=text, evidence={"leaving": len(job.workers)})
        if lacks and job.workers and job.resize is not Resize.LIVE and job.target_gpus <= job.size:
            done = counted(job.size - job.gpus, "GPU")
            left = counted(len(job.workers), "process", "processes")
            text = f"its work on {done} is done; it ends with its other {left}"
            return m.Reason(code="PendingEvaluation", sentence=text, evidence={"gpus": job.gpus})
        outcome = self._outcome(job)
        if outcome is None:
            return m.Reason(code="PendingEvaluation", sentence="no decision has been made since it arrived")
        rests_s = rests_until_s(job, job.wanted, self._loop.now_s())
        if lacks and rests_s is not None:
            text = f"{given} and restarts for them in {rests_s - self._loop.now_s():.0f} s: it restarted a moment ago"
            return m.Reason(code="CoolDown", sentence=text, evidence={"given_gpus": job.target_gpus})
        if outcome.reason is not None:
            reason = with_nodes(self._profiles.in_full(job, outcome.reason), job, self._loop.table)
            is_active = job.id in self._loop.scheduler.view
            reason = self._sharing.explain(job, reason, may_see, is_active=is_active)
            return with_engine(self._with_drained_nodes(reason), job, self._engine)
        if lacks:
            text = f"{given}; its new workers are starting"
            return m.Reason(code="PendingEvaluation", sentence=text, evidence={"gpus": job.gpus})
        if not job.gpus:
            text = "its last event has not been decided on yet"
            return m.Reason(code="PendingEvaluation", sentence=text)
        return self._has_enough(job)

    def _rests(self, job: LiveJob) -> m.Reason:
        """Of a job that failed and starts again later."""
        left_s = max((job.again_s or 0.0) - self._loop.now_s(), 0.0)
        failed = "once" if job.failures == 1 else f"{job.failures} times in a row"
        text = f"it failed {failed} and is tried again in {left_s:.0f} s; last: {job.life.message}"
        return m.Reason(code="CoolDown", sentence=text, evidence={"failures": job.failures, "rest_s": left_s})

    def _adds_none(self, job: LiveJob) -> m.Reason:
        """Of a live job whose new workers were lost soon after they started."""
        left_s = max((job.grows_s or 0.0) - self._loop.now_s(), 0.0)
        lost = f"{counted(job.losses, 'worker')} in a row were lost soon after they started"
        text = f"it goes on with {counted(job.gpus, 'GPU')} and adds workers in {left_s:.0f} s: {lost}"
        evidence: dict[str, float | int | str] = {"lost_workers": job.losses, "rest_s": left_s}
        return m.Reason(code="CoolDown", sentence=f"{text}; last: {job.last_loss}", evidence=evidence)

    def _ends(self, job: LiveJob) -> m.Reason | None:
        """Of a job whose outcome is known and whose last processes are ending."""
        if job.ending == DONE:
            waits = job.life.state is JobState.PENDING
            text = "its work is done and its last processes are ending"
            return m.Reason(code="PendingEvaluation", sentence=text) if waits else None
        left = counted(len(job.workers), "process has", "processes have")
        again = may_restart(job, Cause.FAILED)
        then = "is started again" if again else "is over"
        text = f"it failed ({job.ending}) and {then} when its {left} ended"
        return m.Reason(code="PendingEvaluation", sentence=text, evidence={"leaving": len(job.workers)})

    def _with_drained_nodes(self, reason: m.Reason) -> m.Reason:
        """Name the command that brings drained nodes back, if the job waits for their GPUs."""
        out = reason.evidence.get("nodes_out_of_use")
        names = [] if out is None else str(out).split(", ")
        drained = [name for name in self._loop.drained_names() if name in names]
        if not drained:
            return reason
        how = f"an admin brings it back with `shoal node uncordon {drained[0]}`"
        return reason.model_copy(update={"sentence": f"{reason.sentence}; {how}"})

    def _has_enough(self, job: LiveJob) -> m.Reason | None:
        """Of a job that has all that the policy would ever give it, maybe fewer GPUs than its maximum."""
        scheduler = self._loop.scheduler
        elastic = scheduler.policy.elastic and job.resize is not Resize.NEVER
        most = min(job.max_gpus, scheduler.cluster.total_gpus)
        if not elastic or job.gpus >= most or job.id not in scheduler.view:
            return None
        has, row = f"it has {counted(job.gpus, 'GPU')}", scheduler.view.row(job.id)
        useful = int(scheduler.view.max_gpus[row])
        evidence: dict[str, float | int | str] = {"useful_gpus": useful, "max_gpus": job.max_gpus}
        if useful > job.gpus:
            wish = int(scheduler.policy.wish_gpus(scheduler.view)[row])
            text = f"{has}; policy {scheduler.policy.name} gives it {wish} at most, as it requests"
            return m.Reason(code="NotWorthIt", sentence=text, evidence=evidence | {"wish_gpus": wish})
        text = f"{has}; by its measured speed more would not make it faster"
        return m.Reason(code="NotWorthIt", sentence=text, evidence=evidence)

    def _waits_for_release(self, job: LiveJob, may_see: bool) -> m.Reason:
        if job.colocated:
            text = "it was given a GPU of its own and stays co-located until that GPU is free"
            return m.Reason(code="WaitingForRelease", sentence=text, evidence={"given_gpus": 1})
        holders = [j for j in self._loop.jobs.values() if j.gpus > j.target_gpus]
        names = dict.fromkeys(
            "its own workers" if j is job else shown_name(j, may_see or j.user == job.user) for j in holders
        )
        who = listed(list(names)[:MOST_NAMED], len(names)) or "others"
        has = "has" if len(names) == 1 and job not in holders else "have"
        lacks = job.target_gpus > job.gpus
        what = f"it was given {counted(job.target_gpus, 'GPU')}" if lacks else "it is to move to other GPUs"
        text = f"{what} and waits until {who} {has} released them"
        evidence: dict[str, float | int | str] = {"gpus": job.gpus, "given_gpus": job.target_gpus}
        return m.Reason(code="WaitingForRelease", sentence=text, evidence=evidence)


def shown_name(job: LiveJob, may_see: bool) -> str:
    """Its name, or only its owner's if the asker may not see the job."""
    return job.name if may_see else f"a job of {job.user}"
