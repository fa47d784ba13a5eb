"""What people ask of jobs: how each is, and why it has what it has."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from typing import Any

import numpy as np

from shoal.core.ledger import COLUMNS
from shoal.core.plan import Outcome
from shoal.executors.local import read_json
from shoal.server import models as m
from shoal.server.clock import as_time
from shoal.server.conductor import Conductor
from shoal.server.lifecycle import settle
from shoal.server.live_job import LEAVING, MAX_REFUSED, LiveJob, job_ref
from shoal.server.models import JobState, Resize
from shoal.server.whatif import WhatIf

MOST_AHEAD = 5


class Answers:
    def __init__(self, conductor: Conductor) -> None:
        self.c = conductor
        self.whatif = WhatIf(conductor)

    # -- jobs --------------------------------------------------------------------------------------

    def job(self, row: dict[str, Any], *, workers: bool = False) -> m.Job:
        """A job from its row in the store and, while it is not over, from what is known of it now."""
        spec, progress = row["spec"], row["progress"]
        live = self.c.jobs.get(row["id"])
        found = m.Job(
            id=row["id"],
            name=row["name"],
            user=row["user"],
            state=JobState(row["state"]),
            message=row["message"],
            gpus=row["gpus"],
            target_gpus=row["target_gpus"],
            gpu_type=row["gpu_type"],
            min_gpus=row["min_gpus"],
            max_gpus=row["max_gpus"],
            requested_gpus=row["requested_gpus"],
            resize=Resize(row["resize"]),
            generation=row["generation"],
            command=spec["command"],
            workdir=spec["workdir"],
            env=spec["env"],
            secrets=spec["secrets"],
            gpu_types=spec["gpu_types"],
            weight=spec["weight"],
            model=row["model"],
            max_restarts=spec["max_restarts"],
            replace_stragglers=spec.get("replace_stragglers", False),
            grace_s=spec["grace_s"],
            given=row["given"],
            step=progress.get("step"),
            total_steps=progress.get("total_steps"),
            progress=_fraction(progress.get("step"), progress.get("total_steps")),
            speed=progress.get("speed"),
            values=progress.get("values", {}),
            submitted_at=as_time(row["submitted_s"]),
            started_at=as_time(row["started_s"]),
            finished_at=as_time(row["finished_s"]),
            checkpoint_at=as_time(row["checkpoint_s"]),
            waiting_s=row["waiting_s"],
            running_s=row["running_s"],
            paused_s=row["paused_s"],
            stalled_s=row["stalled_s"],
            gpu_s=row["gpu_s"],
            resizes=row["resizes"],
            restarts=row["restarts"],
            exit_code=row["exit_code"] if JobState(row["state"]).is_final else None,
            signal=row["signal"] if JobState(row["state"]).is_final else None,
        )
        if live is not None:
            self._bring_up_to_date(found, live)
        if workers:
            found.workers = self._workers(row["id"])
        return found

    def _bring_up_to_date(self, found: m.Job, live: LiveJob) -> None:
        life = settle(live.life, self.c.now_s())
        found.state, found.message = life.state, life.message
        found.gpus, found.target_gpus = live.gpus, live.target_gpus
        found.waiting_s, found.running_s = life.waiting_s, life.running_s
        found.paused_s, found.gpu_s, found.stalled_s = life.paused_s, life.gpu_s, live.stalled_s
        found.step, found.total_steps = live.progress.step, live.progress.total_steps
        found.speed, found.values = live.progress.speed, live.progress.values
        found.progress = _fraction(found.step, found.total_steps)
        found.speedup = self.c.profiles.speedup(live)
        found.remaining = self.c.profiles.remaining(live)
        found.reason = self.reason(live)
        places: dict[str, list[int]] = {}
        for worker in live.workers.values():
            if worker.holds_gpu:
                places.setdefault(worker.node, []).append(worker.device[1])
        found.placement = [m.GpuPlace(node=n, gpus=sorted(g)) for n, g in sorted(places.items())]

    def _workers(self, job_id: int) -> list[m.Worker]:
        rows = self.c.store.workers_of(job_id, limit=200)
        found = []
        for row in rows:
            pid = None
            if row["ended_s"] is None:
                started = read_json(self.c.worker_directory(job_id, row["id"]) / "started")
                pid = started["pid"] if started else None
            found.append(
                m.Worker(
                    id=row["id"],
                    rank=row["rank"],
                    node=row["node"],
                    gpu=row["gpu"],
                    state=row["state"],
                    pid=pid,
                    started_at=as_time(row["started_s"]),
                    ended_at=as_time(row["ended_s"]),
                    exit_code=row["exit_code"],
                    signal=row["signal"],
                )
            )
        return found

    # -- why ---------------------------------------------------------------------------------------

    def outcome(self, job: LiveJob) -> Outcome | None:
        scheduler = self.c.scheduler
        if job.id not in scheduler.view and job.id not in scheduler.held:
            return None
        return scheduler.outcome(job.id, self.c.now_s())

    def reason(self, job: LiveJob) -> m.Reason | None:
        """Why it does not have all it could use; None if it has, or is over."""
        if job.life.state is JobState.STOPPING:
            return None
        if job.life.state is JobState.PAUSED:
            text = f"{job.life.message or 'its owner holds it'}; `shoal resume {job.name}` lets it go on"
            return m.Reason(code="Held", sentence=text)
        lacks = job.target_gpus > job.gpus
        if lacks and job.id in self.c.unmet:
            return self._waits_for_release(job)
        if job.target_gpus and job.workers and all(w.state == LEAVING for w in job.workers.values()):
            text = f"it was given {job.target_gpus} GPUs and begins when its {len(job.workers)} old workers have ended"
            return m.Reason(code="WaitingForRelease", sentence=text, evidence={"leaving": len(job.workers)})
        if lacks and job.refused >= MAX_REFUSED:
            text = f"its last {job.refused} new workers failed, so no more are tried until its share changes"
            return m.Reason(code="Misconfigured", sentence=text, evidence={"failed_workers": job.refused})
        outcome = self.outcome(job)
        if outcome is None:
            return m.Reason(code="PendingEvaluation", sentence="no decision has been made since it arrived")
        if outcome.reason is not None:
            return self._in_full(job, m.Reason.of(outcome.reason))
        if lacks:
            text = f"the decision to give it {job.target_gpus} GPUs is being carried out"
            return m.Reason(code="PendingEvaluation", sentence=text, evidence={"gpus": job.gpus})
        if not job.gpus:
            text = "what happened to it last is about to be decided on"
            return m.Reason(code="PendingEvaluation", sentence=text)
        return self._has_enough(job)

    def _in_full(self, job: LiveJob, reason: m.Reason) -> m.Reason:
        """Decisions reckon with the share at which the job is fastest; its owner's maximum is another thing."""
        useful = reason.evidence.get("max_gpus")
        if useful is not None and useful != job.max_gpus:
            reason.evidence |= {"max_gpus": job.max_gpus, "useful_gpus": useful}
        return reason

    def _has_enough(self, job: LiveJob) -> m.Reason | None:
        """It has all that decisions reckon with, and maybe less than its owner allows."""
        elastic = self.c.scheduler.policy.elastic and job.resize is not Resize.NEVER
        most = min(job.max_gpus, self.c.cluster.total_gpus)
        if not elastic or job.gpus >= most:
            return None
        text = f"it has {job.gpus} GPUs; by its measured speed more would not make it faster"
        return m.Reason(
            code="NotWorthIt", sentence=text, evidence={"useful_gpus": job.gpus, "max_gpus": job.max_gpus}
        )

    def _waits_for_release(self, job: LiveJob) -> m.Reason:
        holders = [j for j in self.c.jobs.values() if j.id != job.id and j.gpus > j.target_gpus]
        ids = [str(j.id) for j in holders[:3]]
        who = (
            f"job {ids[0]} has" if len(ids) == 1 else f"jobs {', '.join(ids)} have" if ids else "others have"
        )
        text = f"it was given {job.target_gpus} GPUs and waits until {who} let them go"
        evidence: dict[str, float | int | str] = {"gpus": job.gpus, "given_gpus": job.target_gpus}
        return m.Reason(code="WaitingForRelease", sentence=text, evidence=evidence)

    def why(self, job: LiveJob, may_see: bool) -> m.Why:
        """The answer to `shoal why`; `may_see`: the asker may see all jobs."""
        reason = self.reason(job)
        ahead = self._ahead(job)
        waits = job.gpus == 0 and job.life.state is JobState.PENDING
        return m.Why(
            job=job_ref(job),
            reason=reason,
            sentence=self._sentence(job, reason),
            policy=self.c.policy_name,
            ahead=[job_ref(j, may_see or j.user == job.user) for j in ahead[:MOST_AHEAD]],
            ahead_total=len(ahead),
            starts_in=self._starts_in(job) if waits else None,
            could=self.whatif.could(job) if job.gpus == 0 else [],
            last_decision=self.c.scheduler.plans - 1 if self.c.scheduler.plans else None,
            decided_at=as_time(self.c.decided_s),
        )

    def why_over(self, row: dict[str, Any]) -> m.Why:
        """Of a job that is over."""
        job = self.job(row)
        told = f": {job.message}" if job.message else ""
        ref = m.JobRef(
            id=job.id, name=job.name, user=job.user, state=job.state, gpus=0, target_gpus=0,
            min_gpus=job.min_gpus, max_gpus=job.max_gpus,
        )  # fmt: skip
        sentence = f"{job.name} is over: {job.state.value}{told}"
        return m.Why(job=ref, reason=None, sentence=sentence, policy=self.c.policy_name)

    def _sentence(self, job: LiveJob, reason: m.Reason | None) -> str:
        state = job.life.state.value
        if reason is not None:
            return f"{job.name} is {state}: {reason.sentence}"
        if job.life.state is JobState.STOPPING:
            return f"{job.name} is being cancelled; {len(job.workers)} workers are ending"
        return f"{job.name} is {state} and has all it can use: {job.gpus} GPUs"

    def _ahead(self, job: LiveJob) -> list[LiveJob]:
        """Jobs that have GPUs, then those that came before it and wait too."""
        if job.gpus or job.life.state is not JobState.PENDING:
            return []
        others = [j for j in self.c.jobs.values() if j.id != job.id]
        holding = [j for j in others if j.gpus or j.target_gpus]
        waiting = [
            j for j in others if not j.target_gpus and j.id < job.id and j.life.state is JobState.PENDING
        ]
        return holding + waiting

    def _starts_in(self, job: LiveJob) -> m.Estimate:
        """When enough GPUs are let go by jobs that end, if nothing else happens."""
        need = job.min_gpus if self.c.scheduler.policy.elastic else job.requested_gpus
        before = [j for j in self._ahead(job) if not j.gpus]
        need += sum(j.min_gpus for j in before)
        free = self.c.cluster.total_gpus - self.c.devices.used
        ends = []
        for other in self.c.jobs.values():
            if other.gpus:
                left = self.c.profiles.remaining(other)
                ends.append((other, left))
        known = [(j, e) for j, e in ends if e.unknown is None]
        times = {}
        for bound in ("low_s", "high_s"):
            have, times[bound] = free, None
            for other, left in sorted(known, key=lambda je: getattr(je[1], bound)):
                have += other.gpus
                if have >= need:
                    times[bound] = getattr(left, bound)
                    break
        if times["low_s"] is None or times["high_s"] is None:
            unknown = len(ends) - len(known)
            return m.Estimate(
                unknown=f"the remaining time of {unknown} of {len(ends)} running jobs is not known"
            )
        basis = f"the remaining time of {len(known)} running jobs, and {len(before)} jobs that wait before it"
        return m.Estimate(low_s=times["low_s"], high_s=times["high_s"], basis=basis)

    def profile(self, job: LiveJob) -> m.Profile:
        gpu_type = job.gpu_type or self.c.cluster.gpu_types[0]
        if job.resize is Resize.NEVER:
            points, basis = [], "its size is fixed, so its speed at other sizes does not matter"
        else:
            learner = self.c.profiles.learner(job)
            points, basis = learner.points(gpu_type), learner.basis()
        return m.Profile(
            job=job_ref(job),
            basis=basis,
            points=[m.SpeedPoint(gpus=n, speed=s, measured=k) for n, s, k in points],
            remaining=self.c.profiles.remaining(job),
        )

    def ledger_rates(self, column: str) -> Iterator[tuple[str, str, float]]:
        """(user, GPU type, GPUs) that are `borrowed` or `lent` now."""
        ledger = self.c.ledger
        for u, user in enumerate(ledger.users):
            for t, gpu_type in enumerate(ledger.gpu_types):
                yield user, gpu_type, float(ledger.rate[u, t, COLUMNS.index(column)])

    # -- shares ------------------------------------------------------------------------------------

    def shares(self, since_s: float | None = None) -> m.ShareList:
        """The ledger: since it began, or since the last of its samples before `since_s`."""
        c, ledger = self.c, self.c.ledger
        ledger.settle(c.now_s())
        begin_s, before = c.ledger_since_s, {}
        if since_s is not None:
            begin_s, before = _sample(ledger.state(), since_s)
        items = []
        for i, user in enumerate(c.scheduler.cluster.users):
            known = i < len(ledger.users)
            account = dict.fromkeys(COLUMNS, 0.0)
            if known:
                total = ledger.account[i].sum(axis=0) - np.sum(before.get(i, 0.0), axis=0)
                account = dict(zip(COLUMNS, map(float, total)))
            mine = [j for j in c.jobs.values() if j.user == user.name]
            items.append(
                m.Share(
                    user=user.name,
                    tickets=user.tickets,
                    gpus=sum(j.gpus for j in mine),
                    entitled_gpus=float(ledger.rate[i, :, 0].sum()) if known else 0.0,
                    running_jobs=sum(j.gpus > 0 for j in mine),
                    pending_jobs=sum(j.life.state is JobState.PENDING and not j.gpus for j in mine),
                    **{f"{k}_gpu_s": v for k, v in account.items()},
                )
            )
        return m.ShareList(items=items, since=as_time(begin_s), total_gpus=c.cluster.total_gpus, next=None)


def _sample(state: dict[str, Any], since_s: float) -> tuple[float, dict[int, Any]]:
    """(when, accounts by user): the last sample of the ledger before this time, or its first."""
    times = state["times"]
    k = max(bisect_right(times, since_s) - 1, 0)
    return times[k], dict(enumerate(state["samples"][k]))


def _fraction(step: int | None, total: int | None) -> float | None:
    if step is None or not total:
        return None
    return min(max(step / total, 0.0), 1.0)
