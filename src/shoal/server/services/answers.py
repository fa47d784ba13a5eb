"""What people ask of jobs and users: how each job is, what is known of its speed, who had how much."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from typing import Any

import numpy as np

from shoal.core.ledger import COLUMNS
from shoal.executors.local import read_json
from shoal.server.api import models as m
from shoal.server.api.models import JobState, Resize
from shoal.server.loop.clock import as_time
from shoal.server.loop.conductor import Conductor
from shoal.server.loop.lifecycle import settle
from shoal.server.loop.live_job import LiveJob, job_ref
from shoal.server.services.reasons import Reasons


class Answers:
    def __init__(self, conductor: Conductor) -> None:
        self.c = conductor
        self.reasons = Reasons(conductor)

    # -- jobs --------------------------------------------------------------------------------------

    def job(self, row: dict[str, Any], *, workers: bool = False, may_see: bool = False) -> m.Job:
        """A job from its row in the store and, while it is not over, from what is known of it now.

        `may_see`: the asker may see all jobs, and so hear the names of those that are in its way.
        """
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
            autoscale=spec.get("autoscale"),
            replace_stragglers=spec.get("replace_stragglers", False),
            needs=progress.get("needs"),
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
            self._bring_up_to_date(found, live, may_see)
        if workers:
            found.workers = self._workers(row["id"])
        return found

    def _bring_up_to_date(self, found: m.Job, live: LiveJob, may_see: bool) -> None:
        life = settle(live.life, self.c.now_s())
        found.state, found.message = life.state, life.message
        found.gpus, found.target_gpus = live.gpus, live.target_gpus
        found.guest_of = live.host if live.lodges else None
        found.waiting_s, found.running_s = life.waiting_s, life.running_s
        found.paused_s, found.gpu_s, found.stalled_s = life.paused_s, life.gpu_s, live.stalled_s
        found.step, found.total_steps = live.progress.step, live.progress.total_steps
        found.speed, found.values = live.progress.speed, live.progress.values
        found.progress = _fraction(found.step, found.total_steps)
        found.speedup = self.c.profiles.speedup(live)
        found.remaining = self.c.profiles.remaining(live)
        found.reason = self.reasons.reason(live, may_see)
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
        ledger = self.c.book.ledger
        for u, user in enumerate(ledger.users):
            for t, gpu_type in enumerate(ledger.gpu_types):
                yield user, gpu_type, float(ledger.rate[u, t, COLUMNS.index(column)])

    # -- shares ------------------------------------------------------------------------------------

    def shares(self, since_s: float | None = None) -> m.ShareList:
        """The ledger: since it began, or since the last of its samples before `since_s`."""
        c, ledger = self.c, self.c.book.ledger
        ledger.settle(c.now_s())
        begin_s, before = c.book.since_s, {}
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
                    running_jobs=sum(j.gpus > 0 or j.life.state is JobState.RUNNING for j in mine),
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
