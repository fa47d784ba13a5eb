"""Why a job had its share at a past time, and which jobs took its GPUs, reconstructed from the events."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from shoal.core.job import GpuRange
from shoal.core.words import counted
from shoal.server.api import models as m
from shoal.server.api.models import JobState
from shoal.server.loop.clock import as_time
from shoal.server.loop.live_job import job_ref
from shoal.server.services.errors import Invalid
from shoal.server.services.loop_view import LoopView
from shoal.server.store.change import Row
from shoal.server.store.store import Store

#: The state of a job after each type of event.
STATE_AFTER = {
    "job.submitted": JobState.PENDING,
    "job.started": JobState.STARTING,
    "job.running": JobState.RUNNING,
    "job.preempted": JobState.PENDING,
    "job.restarted": JobState.PENDING,
    "job.paused": JobState.PAUSED,
    "job.resumed": JobState.PENDING,
    "job.stopping": JobState.STOPPING,
    "job.succeeded": JobState.SUCCEEDED,
    "job.failed": JobState.FAILED,
    "job.cancelled": JobState.CANCELLED,
}
TYPES = (*STATE_AFTER, "job.resized", "job.owns", "job.target", "job.scaled")
MOST_NAMED = 5


@dataclass(slots=True)
class Then:
    """A job at a past time, from the events up to then."""

    id: int
    user: str
    name: str = ""
    state: JobState = JobState.PENDING
    gpus: int = 0
    target_gpus: int = 0
    min_gpus: int = 1
    max_gpus: int = 1
    step_gpus: int = 1
    last: Row | None = None

    def take(self, event: Row) -> None:
        kind, data = event["type"], event["data"]
        if kind in STATE_AFTER:
            self.state, self.last = STATE_AFTER[kind], event
            if self.state not in (JobState.STARTING, JobState.RUNNING, JobState.STOPPING):
                self.gpus = 0
        if kind in ("job.started", "job.running", "job.resized", "job.owns"):
            self.gpus = data.get("gpus", self.gpus)
        if kind == "job.target":
            self.target_gpus, self.last = data["to_gpus"], event
        if kind in ("job.submitted", "job.scaled"):
            gpus = GpuRange.parse(data["gpus"] if kind == "job.submitted" else data["to"])
            self.min_gpus, self.max_gpus, self.step_gpus = gpus.min, gpus.max, gpus.step
            self.name = data.get("name", self.name)

    def ref(self, may_see: bool) -> m.JobRef:
        return m.JobRef(
            id=self.id,
            name=self.name if may_see else None,
            user=self.user,
            state=self.state,
            gpus=self.gpus,
            target_gpus=self.target_gpus,
            min_gpus=self.min_gpus,
            max_gpus=self.max_gpus,
            step_gpus=self.step_gpus,
        )


def fold(events: Iterable[Row]) -> dict[int, Then]:
    """The jobs of these events, each in the state after its last event."""
    found: dict[int, Then] = {}
    for event in events:
        found.setdefault(event["job"], Then(event["job"], event["user"])).take(event)
    return found


class History:
    def __init__(self, loop: LoopView, store: Store) -> None:
        self._loop, self._store = loop, store

    def why(self, row: Row, at_s: float, may_see: bool) -> m.Why:
        """The answer to `shoal why JOB --at TIME`."""
        when = as_time(at_s)
        if at_s < row["submitted_s"]:
            raise Invalid(f"at: {row['name']} was submitted later, at {as_time(row['submitted_s'])}", "at")
        if at_s > self._loop.now_s():
            raise Invalid("at: this time is yet to come", "at")
        jobs = fold(self._store.events_of_jobs_at(at_s, TYPES))
        mine = jobs.pop(row["id"], None)
        if mine is None:  # it had ended by then
            own = self._store.events(job=row["id"], type="job.", until_s=at_s, limit=100_000)
            mine = fold(own)[row["id"]]
        holders = [j for j in jobs.values() if j.gpus]
        waits = mine.state is JobState.PENDING
        before = [j for j in jobs.values() if j.state is JobState.PENDING and j.id < mine.id]
        ahead = [*holders, *before] if waits else []
        last = mine.last or {}
        reason = self._reason(mine, holders, at_s)
        return m.Why(
            job=mine.ref(True),
            reason=reason,
            sentence=self._sentence(mine, reason),
            policy=self.policy_at(at_s),
            ahead=[j.ref(may_see or j.user == mine.user) for j in ahead[:MOST_NAMED]],
            ahead_total=len(ahead),
            last_decision=last.get("plan"),
            decided_at=as_time(last.get("at_s")),
            at=when,
        )

    def _reason(self, job: Then, holders: list[Then], at_s: float) -> m.Reason | None:
        """What the events prove: who held which GPUs. The policy's own numbers are kept only for preemptions."""
        total = self._loop.scheduler.cluster.total_gpus
        free = total - sum(j.gpus for j in holders) - job.gpus
        evidence: dict[str, float | int | str] = {"gpus": job.gpus, "free_gpus": max(free, 0)}
        evidence |= {"min_gpus": job.min_gpus, "max_gpus": job.max_gpus, "holders": len(holders)}
        if job.state is JobState.PAUSED:
            return m.Reason(code="Held", sentence=(job.last or {}).get("message", "its owner held it"))
        given = f"it had been given {counted(job.target_gpus, 'GPU')}"
        if job.state is JobState.PENDING and job.target_gpus:
            text = f"{given} that others had not released yet"
            return m.Reason(code="WaitingForRelease", sentence=text, evidence=evidence)
        were_free = counted(max(free, 0), "was", "were") + " free"
        if job.state is JobState.PENDING:
            later = [j for j in holders if j.id > job.id]
            code = "BehindOthers" if later else "WaitingForCapacity"
            text = f"it needed {counted(job.min_gpus, 'GPU')} and {were_free}"
            text += f"; {counted(len(holders), 'job')} held the rest" if holders else ""
            text += f", {len(later)} of which came after it" if later else ""
            return m.Reason(code=code, sentence=text, evidence=evidence)
        if job.gpus < job.target_gpus and job.state in (JobState.STARTING, JobState.RUNNING):
            evidence["given_gpus"] = job.target_gpus
            has = f"had {job.gpus}" if job.gpus else "had none yet"
            text = f"{given} and {has}: its new workers were starting"
            return m.Reason(code="PendingEvaluation", sentence=text, evidence=evidence)
        if job.state is JobState.RUNNING and job.gpus < job.max_gpus:
            recorded = (job.last or {}).get("data", {}).get("reason")
            if recorded is not None:
                return m.Reason(**recorded)
            text = f"it had {job.gpus} of {job.max_gpus} GPUs; {were_free}"
            return m.Reason(code="NotWorthIt", sentence=text, evidence=evidence)
        return None

    @staticmethod
    def _sentence(job: Then, reason: m.Reason | None) -> str:
        if reason is not None:
            return f"{job.name} was {job.state.value}: {reason.sentence}"
        if job.state.is_final:
            return f"{job.name} was over: {job.state.value}"
        return f"{job.name} was {job.state.value} with {counted(job.gpus, 'GPU')}, all it could use"

    def policy_at(self, at_s: float) -> str:
        """The policy in force at this time."""
        rows = [
            row
            for kind in ("policy.changed", "server.started")
            for row in self._store.events(type=kind, until_s=at_s, tail=1)
        ]
        if rows:
            return str(max(rows, key=lambda row: row["id"])["data"].get("policy", self._loop.policy_name))
        later = self._store.events(type="policy.changed", since_s=at_s, limit=1)
        return str(
            later[0]["data"].get("before", self._loop.policy_name) if later else self._loop.policy_name
        )

    def preempted(self, row: Row, may_see: bool) -> m.Preemption | None:
        """The last time that the scheduler took GPUs from the job and gave some to others."""
        events = self._store.events_of_job(row["id"], ["job.target"])
        taken = [e for e in events if e["data"].get("by")]
        if not taken:
            return None
        event = taken[-1]
        data = event["data"]
        by = [found for i in data["by"] if (found := self._ref(i, row["user"], may_see)) is not None]
        names = ", ".join(ref.name or f"a job of {ref.user}" for ref in by) or "other jobs"
        policy = data.get("policy", self._loop.policy_name)
        verb = "all its GPUs" if not data["to_gpus"] else counted(data["from_gpus"] - data["to_gpus"], "GPU")
        return m.Preemption(
            at=as_time(event["at_s"]),
            from_gpus=data["from_gpus"],
            to_gpus=data["to_gpus"],
            policy=policy,
            by=by,
            reason=m.Reason(**data["reason"]) if data.get("reason") else None,
            decision=event["plan"],
            sentence=f"policy {policy} took {verb} ({data['from_gpus']} -> {data['to_gpus']}) and gave to {names}",
        )

    def _ref(self, job_id: int, user: str, may_see: bool) -> m.JobRef | None:
        live = self._loop.jobs.get(job_id)
        if live is not None:
            return job_ref(live, may_see or live.user == user)
        row = self._store.job(job_id)
        if row is None:
            return None
        return m.JobRef(
            id=row["id"],
            name=row["name"] if may_see or row["user"] == user else None,
            user=row["user"],
            state=JobState(row["state"]),
            gpus=0,
            target_gpus=0,
            min_gpus=row["min_gpus"],
            max_gpus=row["max_gpus"],
            step_gpus=GpuRange.step_of(row["spec"]["gpus"]),
        )
