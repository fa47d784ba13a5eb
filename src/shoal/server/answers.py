"""What people ask of jobs: how each is, and why it has what it has."""

from __future__ import annotations

import copy
from typing import Any

from shoal.core.events import Submitted
from shoal.core.job import GpuRange
from shoal.core.job import Job as CoreJob
from shoal.core.plan import Outcome
from shoal.executors.local import read_json
from shoal.scheduler.scheduler import Scheduler
from shoal.server import models as m
from shoal.server.clock import as_time
from shoal.server.conductor import Conductor
from shoal.server.learning import assumed_speed, fixed_profile
from shoal.server.lifecycle import settle
from shoal.server.live_job import LiveJob
from shoal.server.models import JobState, Resize

MOST_AHEAD = 5


class Answers:
    def __init__(self, conductor: Conductor) -> None:
        self.c = conductor

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

    def ref(self, job: LiveJob, may_see: bool = True) -> m.JobRef:
        return m.JobRef(
            id=job.id,
            name=job.name if may_see else None,
            user=job.user,
            state=job.life.state,
            gpus=job.gpus,
            target_gpus=job.target_gpus,
            min_gpus=job.min_gpus,
            max_gpus=job.max_gpus,
        )

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
        if job.target_gpus > job.gpus and job.id in self.c.unmet:
            return self._waits_for_release(job)
        outcome = self.outcome(job)
        if outcome is None:
            return m.Reason(code="PendingEvaluation", sentence="no decision has been made since it arrived")
        reason = outcome.reason
        if reason is None:
            if job.gpus < job.target_gpus:
                text = f"it was given {job.target_gpus} GPUs; its workers are being prepared"
                return m.Reason(code="WaitingForRelease", sentence=text, evidence={"gpus": job.gpus})
            return None
        return m.Reason(
            code=reason.code.label, sentence=reason.sentence, evidence=_finite(dict(reason.evidence))
        )

    def _waits_for_release(self, job: LiveJob) -> m.Reason:
        holders = [j for j in self.c.jobs.values() if j.id != job.id and j.gpus > j.target_gpus]
        names = ", ".join(str(j.id) for j in holders[:3]) or "others"
        text = f"it was given {job.target_gpus} GPUs and waits until job {names} has let them go"
        evidence: dict[str, float | int | str] = {"gpus": job.gpus, "given_gpus": job.target_gpus}
        return m.Reason(code="WaitingForRelease", sentence=text, evidence=evidence)

    def why(self, job: LiveJob, may_see: bool) -> m.Why:
        """The answer to `shoal why`; `may_see`: the asker may see all jobs."""
        reason = self.reason(job)
        ahead = self._ahead(job)
        waits = job.gpus == 0 and job.life.state is JobState.PENDING
        return m.Why(
            job=self.ref(job),
            reason=reason,
            sentence=self._sentence(job, reason),
            policy=self.c.policy_name,
            ahead=[self.ref(j, may_see or j.user == job.user) for j in ahead[:MOST_AHEAD]],
            ahead_total=len(ahead),
            starts_in=self._starts_in(job) if waits else None,
            could=self._could(job) if job.gpus == 0 else [],
            last_decision=self.c.scheduler.plans - 1 if self.c.scheduler.plans else None,
            decided_at=as_time(self.c.decided_s),
        )

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

    def _could(self, job: LiveJob) -> list[m.CouldDo]:
        """The smallest change that would start it now, found by asking the planner."""
        if job.life.state is JobState.PAUSED:
            text = "resume it" if self._would_start(job) else "resume it; it would wait for GPUs then"
            return [m.CouldDo(change="resume", value=job.name, sentence=text)]
        if job.life.state is not JobState.PENDING or job.target_gpus:
            return []
        found: list[m.CouldDo] = []
        smaller = self._smaller_that_starts(job)
        if smaller is not None:
            text = f"with a minimum of {smaller} GPUs instead of {job.min_gpus} it would start now"
            found.append(m.CouldDo(change="min_gpus", value=smaller, sentence=text))
        if job.spec["gpu_types"] and self._would_start(job, gpu_types=()):
            found.append(
                m.CouldDo(change="gpu_types", value="any", sentence="on any GPU type it would start now")
            )
        return found

    def _smaller_that_starts(self, job: LiveJob) -> int | None:
        size = job.min_gpus if self.c.scheduler.policy.elastic else job.requested_gpus
        low, high, best = 1, size - 1, None
        while low <= high:  # starting is monotone in the size: less is never harder to place
            middle = (low + high) // 2
            if self._would_start(job, min_gpus=middle):
                best, low = middle, middle + 1
            else:
                high = middle - 1
        return best

    def _would_start(
        self, job: LiveJob, min_gpus: int | None = None, gpu_types: tuple[str, ...] | None = None
    ) -> bool:
        """Whether the job, changed so and in its own place in the order, would get GPUs now."""
        scheduler = self._copy()
        core, profile = self.c.profiles.of(job)
        low = min_gpus or core.gpus.min
        high = max(low, core.gpus.max) if job.resize is not Resize.NEVER else low
        if job.resize is Resize.NEVER:
            profile = fixed_profile("what-if", low)
        changed = CoreJob(
            name=core.name,
            submit_s=core.submit_s,
            gpus=GpuRange(low, high),
            requested_gpus=low if min_gpus else core.requested_gpus,
            user=core.user,
            model=core.model,
            iterations=core.iterations,
            gpu_types=core.gpu_types if gpu_types is None else gpu_types,
            weight=core.weight,
        )
        now_s = self.c.now_s()
        new_id = self._next_id()
        if job.id in scheduler.jobs:
            from shoal.core.events import Cancelled

            scheduler._take_in(Cancelled(job.id), now_s)
        scheduler.step(now_s, [Submitted(new_id, changed, profile)])
        return scheduler.outcome(new_id, now_s).share.gpus > 0

    def _copy(self) -> Scheduler:
        """A scheduler to try things on. What it decides, no one hears of."""
        return copy.deepcopy(self.c.scheduler)

    def _next_id(self) -> int:
        ids = [*self.c.scheduler.jobs, *self.c.jobs]
        return max(ids, default=0) + 1

    def plan(self, spec: m.JobSpec, user: str, may_see: bool) -> m.PlanOutcome:
        """What would happen if this job were submitted now."""
        gpus = spec.range
        scheduler, now_s, job_id = self._copy(), self.c.now_s(), self._next_id()
        total = self.c.cluster.total_gpus
        if spec.effective_resize is Resize.NEVER:
            profile = fixed_profile("what-if", gpus.max)
        else:
            from shoal.core.profile import ANY_TYPE, Profile, SpeedCurve

            curve = SpeedCurve(assumed_speed(min(gpus.max, total)))
            profile = Profile("what-if", {ANY_TYPE: {0: curve}})
        core = CoreJob(
            name=spec.name or "what-if",
            submit_s=now_s,
            gpus=gpus,
            requested_gpus=spec.requested_gpus or max(min(gpus.max, total), gpus.min),
            user=user,
            iterations=spec.iterations or 3600.0,
            gpu_types=tuple(spec.gpu_types),
            weight=spec.weight,
        )
        plan = scheduler.step(now_s, [Submitted(job_id, core, profile)])
        outcome = scheduler.outcome(job_id, now_s)
        changes = []
        for command in plan.commands:
            other = self.c.jobs.get(command.job)
            if other is not None and command.share.gpus != other.target_gpus:
                changes.append(
                    m.Change(
                        job=self.ref(other, may_see or other.user == user),
                        from_gpus=other.target_gpus,
                        to_gpus=command.share.gpus,
                    )
                )
        got = outcome.share.gpus
        reason = outcome.reason
        shrinks = any(c.to_gpus < c.from_gpus for c in changes)
        verdict = "waits" if not got else "shrinks_others" if shrinks else "starts"
        if got:
            sentence = f"it would start now with {got} GPUs"
            if shrinks:
                sentence += f"; {sum(c.to_gpus < c.from_gpus for c in changes)} other jobs would shrink"
        else:
            sentence = f"it would wait: {reason.sentence}" if reason else "it would wait"
        return m.PlanOutcome(
            verdict=verdict,
            gpus=got,
            reason=m.Reason(
                code=reason.code.label, sentence=reason.sentence, evidence=_finite(dict(reason.evidence))
            )
            if reason
            else None,
            sentence=sentence,
            changes=changes,
        )

    def profile(self, job: LiveJob) -> m.Profile:
        gpu_type = job.gpu_type or self.c.cluster.gpu_types[0]
        if job.resize is Resize.NEVER:
            points, basis = [], "its size is fixed, so its speed at other sizes does not matter"
        else:
            learner = self.c.profiles.learner(job)
            points, basis = learner.points(gpu_type), learner.basis()
        return m.Profile(
            job=self.ref(job),
            basis=basis,
            points=[m.SpeedPoint(gpus=n, speed=s, measured=k) for n, s, k in points],
            remaining=self.c.profiles.remaining(job),
        )

    # -- shares ------------------------------------------------------------------------------------

    def shares(self) -> m.ShareList:
        c = self.c
        c.ledger.settle(c.now_s())
        totals = c.ledger.totals()
        rate = c.ledger.rate
        items = []
        for i, user in enumerate(c.scheduler.cluster.users):
            known = i < len(c.ledger.users)
            account = dict.fromkeys(("entitled", "received", "lent", "borrowed", "traded"), 0.0)
            if known:
                for gpu_type in c.ledger.gpu_types:
                    for key in account:
                        account[key] += totals[user.name][gpu_type][key]
            mine = [j for j in c.jobs.values() if j.user == user.name]
            items.append(
                m.Share(
                    user=user.name,
                    tickets=user.tickets,
                    gpus=sum(j.gpus for j in mine),
                    entitled_gpus=float(rate[i, :, 0].sum()) if known else 0.0,
                    running_jobs=sum(j.gpus > 0 for j in mine),
                    pending_jobs=sum(j.life.state is JobState.PENDING and not j.gpus for j in mine),
                    **{f"{k}_gpu_s": v for k, v in account.items()},
                )
            )
        return m.ShareList(
            items=items, since=as_time(c.ledger_since_s), total_gpus=c.cluster.total_gpus, next=None
        )


def _fraction(step: int | None, total: int | None) -> float | None:
    if step is None or not total:
        return None
    return min(max(step / total, 0.0), 1.0)


def _finite(evidence: dict[str, Any]) -> dict[str, Any]:
    """JSON knows no infinity; such a number says nothing anyway."""
    return {
        k: v.item() if hasattr(v, "item") else v
        for k, v in evidence.items()
        if not (isinstance(v, float) and (v != v or v in (float("inf"), float("-inf"))))
    }
