"""Jobs as they are: found by number or name, listed, and shown with what is known of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

from shoal.core.errors import did_you_mean
from shoal.core.job import GpuRange
from shoal.executors.keeper_files import read_started
from shoal.scheduler.exploration.outlook import Outlook
from shoal.server.api import models as m
from shoal.server.api.models import JobState, Resize
from shoal.server.loop.clock import as_time
from shoal.server.loop.lifecycle import settle
from shoal.server.loop.live_job import LiveJob, job_ref
from shoal.server.loop.profiles import Profiles
from shoal.server.services.errors import Conflict, NotFound
from shoal.server.services.job_logs import WorkerDirectory
from shoal.server.services.loop_view import LoopView
from shoal.server.services.naming import printable
from shoal.server.services.reasons import Reasons
from shoal.server.store.change import Row
from shoal.server.store.store import Store

#: Jobs of a list to describe before other tasks of the event loop get a turn.
SLICE = 100
#: Workers of one job to show, the newest.
MOST_WORKERS = 200


class Jobs:
    def __init__(
        self,
        loop: LoopView,
        store: Store,
        profiles: Profiles,
        reasons: Reasons,
        worker_directory: WorkerDirectory,
        idle_s: Callable[[LiveJob], float | None],
    ) -> None:
        """`idle_s`: how long a job has held GPUs without using them."""
        self._idle_s = idle_s
        self._loop, self._store, self._profiles, self._reasons = loop, store, profiles, reasons
        self._worker_directory = worker_directory

    def find(self, job: str, only: str | None) -> Row:
        """The job with this number or name. `only`: the user whose jobs may be seen; None for all."""
        row = None
        if job.isascii() and job.isdigit() and len(job) < 18:
            row = self._store.job(int(job))
        elif all(31 < ord(c) != 127 and not 0xD800 <= ord(c) < 0xE000 for c in job):
            row = self._store.job_named(job, only)
        if row is None or only not in (None, row["user"]):
            names = {j.name for j in self._loop.jobs.values() if only in (None, j.user)}
            hint = did_you_mean(job, names) if names and len(names) < 1000 else None
            if hint is None or not hint.startswith("did you mean"):
                hint = "`shoal ps -a` lists the jobs you may see"
            raise NotFound(f"there is no job {printable(job)!r}", hint)
        return row

    def live(self, job_id: int) -> LiveJob | None:
        """The job as the control loop has it; None if it is over."""
        return self._loop.jobs.get(job_id)

    def find_live(self, job: str, only: str | None) -> LiveJob:
        """The same as `find`, for a job that is not over."""
        row = self.find(job, only)
        live = self.live(row["id"])
        if live is None:
            raise Conflict(f"job {row['name']} is over: it {row['state']}")
        return live

    async def page(
        self,
        *,
        states: Sequence[str] | None,
        user: str | None,
        name: str | None,
        since_s: float | None,
        before_id: int | None,
        limit: int,
        may_see: bool,
        labels: Mapping[str, str] | None = None,
        array: int | None = None,
    ) -> list[m.Job]:
        """Jobs, newest first. Decisions do not wait for a long list."""
        rows = self._store.jobs(
            states=states, user=user, name=name, since_s=since_s, before_id=before_id, limit=limit,
            labels=labels, array=array,
        )  # fmt: skip
        items = []
        for i, row in enumerate(rows):
            if i % SLICE == SLICE - 1:
                await asyncio.sleep(0)
            items.append(self.describe(row, may_see=may_see))
        return items

    def by_id(self, job_id: int, *, workers: bool = True) -> m.Job:
        live = self.live(job_id)
        row = live.whole_row() if live is not None else self._store.job(job_id)
        assert row is not None
        return self.describe(row, workers=workers)

    def describe(self, row: Row, *, workers: bool = False, may_see: bool = False) -> m.Job:
        """A job from its row in the store and, while it is not over, from what the control loop knows.

        `may_see`: the asker may see all jobs, so reasons may name them.
        """
        spec, progress = row["spec"], row["progress"]
        live = self.live(row["id"])
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
            step_gpus=GpuRange.step_of(spec["gpus"]),
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
            target_loss=spec.get("target_loss"),
            replace_stragglers=spec.get("replace_stragglers", False),
            needs=progress.get("needs"),
            grace_s=spec["grace_s"],
            priority=spec.get("priority", 0),
            labels=spec.get("labels", {}),
            not_before=spec.get("not_before"),
            deadline=spec.get("deadline"),
            time_limit_s=spec.get("time_limit_s"),
            warn_signal=spec.get("warn_signal"),
            warn_s=spec.get("warn_s", 60.0),
            after=spec.get("after", []),
            array=_array(row),
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
        life = settle(live.life, self._loop.now_s())
        found.state, found.message = life.state, life.message
        found.gpus, found.target_gpus = live.gpus, live.target_gpus
        found.guest_of = live.host if live.colocated else None
        found.waiting_s, found.running_s = life.waiting_s, life.running_s
        found.paused_s, found.gpu_s, found.stalled_s = life.paused_s, life.gpu_s, live.stalled_s
        found.step, found.total_steps = live.progress.step, live.progress.total_steps
        found.speed, found.values = live.progress.speed, live.progress.values
        found.progress = _fraction(found.step, found.total_steps)
        found.speedup, found.speedup_measured = self._profiles.speedup(live)
        found.remaining = self._profiles.remaining(live)
        found.idle_s = self._idle_s(live)
        found.reason = self._reasons.reason(live, may_see)
        places: dict[str, list[int]] = {}
        for worker in live.workers.values():
            if worker.holds_gpu:
                places.setdefault(worker.node, []).extend(gpu for _, gpu in worker.devices)
        found.placement = [m.GpuPlace(node=n, gpus=sorted(g)) for n, g in sorted(places.items())]

    def _workers(self, job_id: int) -> list[m.Worker]:
        found = []
        for row in self._store.workers_of(job_id, limit=MOST_WORKERS):
            pid = None
            if row["ended_s"] is None:
                started = read_started(self._worker_directory(job_id, row["id"]))
                pid = started.pid if started else None
            found.append(
                m.Worker(
                    id=row["id"],
                    rank=row["rank"],
                    node=row["node"],
                    gpu=row["gpu"],
                    gpus=[row["gpu"], *(row["more_gpus"] or [])],
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
        """What is known of its speed by share, and of the work left."""
        gpu_type = job.gpu_type or self._loop.scheduler.cluster.gpu_types[0]
        scheduler = self._loop.scheduler
        points: list[m.SpeedPoint] = []
        basis = "its size is fixed, so its speed at other sizes does not matter"
        following = Outlook(None, "nothing: only jobs that are resized live are measured at other sizes")
        if job.resize is not Resize.NEVER:
            learner = self._profiles.learner(job)
            points, basis = learner.points(gpu_type), learner.basis()
        if job.resize is Resize.LIVE:
            following = scheduler.measured_next(job.id, self._loop.now_s())
        trial = None
        if scheduler.exploration is not None:
            trial = scheduler.exploration.reason(job.id, scheduler.cluster.gpu_types)
        return m.Profile(
            job=job_ref(job),
            basis=basis,
            points=points,
            remaining=self._profiles.remaining(job),
            next_gpus=following.gpus,
            next_measurement=following.sentence,
            measuring=None if trial is None else trial.sentence,
        )


def _array(row: Row) -> m.ArrayRef | None:
    if row["array"] is None:
        return None
    task = row["spec"]["task"]
    return m.ArrayRef(
        id=row["array"], name=task["name"], index=row["array_index"], values=task.get("values", {})
    )


def _fraction(step: int | None, total: int | None) -> float | None:
    if step is None or not total:
        return None
    return min(max(step / total, 0.0), 1.0)
