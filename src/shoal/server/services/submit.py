"""Submit jobs: check them, choose their size if they leave that open, record them, and tell the control loop."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from shoal.core.events import Event, Submitted
from shoal.core.job import GpuRange
from shoal.knowledge.auto_gpus import AutoGpus
from shoal.knowledge.size_search import Autoscale
from shoal.scheduler.limits.waiting import refusal
from shoal.scheduler.scheduler import Scheduler
from shoal.server.api.models import AUTO, JobSpec, JobState
from shoal.server.api.models.tasks import Task, most_running, tasks_of
from shoal.server.home import Home
from shoal.server.loop.live_job import LiveJob
from shoal.server.loop.profiles import Profiles
from shoal.server.loop.searches import Searches
from shoal.server.services.accounts import Accounts
from shoal.server.services.auto import auto_gpus
from shoal.server.services.engine_view import EngineView
from shoal.server.services.errors import Conflict, Invalid
from shoal.server.services.feasible import feasible_range, most_gpus
from shoal.server.services.needs import given_needs, learned_needs
from shoal.server.services.record import Submission, body_hash, recorded
from shoal.server.services.waits_for import MAX_WAITS, waits_for
from shoal.server.services.workdirs import Workdirs
from shoal.server.store.store import Store

MAX_ACTIVE_JOBS_OF_USER = 10_000


class SubmitLoop(Protocol):
    """What a submission needs of the control loop."""

    @property
    def jobs(self) -> dict[int, LiveJob]: ...

    @property
    def scheduler(self) -> Scheduler: ...

    def now_s(self) -> float: ...

    def post(self, *events: Event) -> None: ...


class Submit:
    def __init__(
        self,
        loop: SubmitLoop,
        store: Store,
        home: Home,
        profiles: Profiles,
        searches: Searches,
        *,
        learns_needs: Callable[[], bool],
        workdirs: Workdirs,
        engine: EngineView,
        accounts: Accounts,
    ) -> None:
        """`learns_needs`: whether GPUs may be shared, so that what a job needs of one matters."""
        self._loop, self._store, self._home = loop, store, home
        self._profiles, self._searches = profiles, searches
        self._learns_needs, self._workdirs = learns_needs, workdirs
        self._engine, self._accounts = engine, accounts

    async def submit(
        self, spec: JobSpec, user: str, *, key: str | None = None, only: str | None = None
    ) -> tuple[int, bool]:
        """(id, whether it is new). With a key, the same submission again returns the same job.

        `only`: the user whose jobs it may wait for; None for all.
        """
        if spec.array is not None or spec.sweep is not None:
            field = "array" if spec.array is not None else "sweep"
            raise Invalid(f"{field}: this is many jobs; submit them with POST /arrays", field)
        size = await self.auto_gpus(spec, user)
        needs = await self._needs(spec, user)
        (job_id,), new = self._submit(spec, user, key, size, needs, (), only)
        return job_id, new

    async def submit_array(
        self, spec: JobSpec, user: str, *, key: str | None = None, only: str | None = None
    ) -> tuple[int, bool]:
        """(id of the array, whether it is new). All its jobs are submitted, or none."""
        if spec.array is None and spec.sweep is None:
            raise Invalid("array: give an array or a sweep; submit a single job with POST /jobs", "array")
        size = await self.auto_gpus(spec, user)
        tasks = tasks_of(spec.array, spec.sweep)
        ids, new = self._submit(spec, user, key, size, given_needs(spec), tasks, only)
        row = self._store.job(ids[0])
        assert row is not None
        return int(row["array"]), new

    async def auto_gpus(self, spec: JobSpec, user: str) -> AutoGpus | None:
        """The size chosen for a job that leaves it open (`gpus: auto`); None for others."""
        if spec.gpus != AUTO:
            return None
        most = most_gpus(spec, self._loop.scheduler.cluster, self._engine)
        return await auto_gpus(self._store, self._profiles, spec, user, most)

    def range_of(self, spec: JobSpec) -> GpuRange:
        """Its range of GPUs; Infeasible if the cluster could never run it."""
        return feasible_range(spec, self._loop.scheduler.cluster, self._engine)

    async def _needs(self, spec: JobSpec, user: str) -> dict[str, Any] | None:
        if self._learns_needs() and spec.gpus != AUTO and spec.range.min == 1:
            return await learned_needs(self._store, spec, user)
        return given_needs(spec)

    def _submit(
        self,
        spec: JobSpec,
        user: str,
        key: str | None,
        size: AutoGpus | None,
        needs: dict[str, Any] | None,
        tasks: Sequence[Task],
        only: str | None,
    ) -> tuple[list[int], bool]:
        self._accounts.must_have_one(user)
        if key is not None and (before := self._store.idempotent(user, key)) is not None:
            if before["body_hash"] != body_hash(spec):
                raise Conflict("this idempotency key was used for another job; use a new one")
            return [before["job"]], False
        given, now_s = spec, self._loop.now_s()
        if size is not None:
            spec = spec.model_copy(update={"gpus": str(size.gpus)})
        gpus = self.range_of(spec)
        if spec.autoscale:
            Autoscale.parse(spec.autoscale)  # raises if it is not understood
        self._check_upload(spec, user)
        self._check_times(spec, now_s)
        self._check_limits(spec.name, user, tasks)
        after = waits_for(spec, self._store, only)
        if len(after) * len(tasks) > MAX_WAITS:
            raise Invalid(f"after: {len(tasks)} jobs that wait for {len(after)} others are too many", "after")
        most = most_gpus(spec, self._loop.scheduler.cluster, self._engine)
        submission = Submission(
            spec, user, gpus, spec.requested_gpus or max(gpus.floor(min(gpus.max, most)), gpus.min), size, needs, after,
            key, body_hash(given), tasks, most_running(given.array, given.max_running),
        )  # fmt: skip
        jobs = recorded(submission, self._store, self._home, now_s)
        events: list[Event] = []
        for job in jobs:
            self._loop.jobs[job.id] = job
            core, profile = self._profiles.of(job)
            events += [Submitted(job.id, core, profile), *self._searches.cap_events(job)]
        self._loop.post(*events)
        return [job.id for job in jobs], True

    def _check_upload(self, spec: JobSpec, user: str) -> None:
        if not spec.upload:
            return
        if spec.tree is None:
            raise Invalid(
                "tree: upload the directory first (PUT /workdirs/DIGEST) and give its digest", "tree"
            )
        self._workdirs.size_bytes(user, spec.tree)  # it is kept until the job is on record

    def _check_times(self, spec: JobSpec, now_s: float) -> None:
        if spec.deadline is not None and spec.deadline.timestamp() <= now_s:
            raise Invalid("deadline: it is in the past; give a time to come", "deadline")
        if spec.deadline is not None and spec.not_before is not None and spec.deadline <= spec.not_before:
            raise Invalid("deadline: it is before not_before, so it could never be met", "deadline")

    def _check_limits(self, name: str | None, user: str, tasks: Sequence[Task]) -> None:
        mine = [j for j in self._loop.jobs.values() if j.user == user]
        count = len(tasks) or 1
        if len(mine) + count > MAX_ACTIVE_JOBS_OF_USER:
            raise Conflict(
                f"you have {len(mine)} unfinished jobs; with {count} more the limit of "
                f"{MAX_ACTIVE_JOBS_OF_USER} would be exceeded"
            )
        if name is not None:
            names = {f"{name}-{task.index}" for task in tasks} or {name}
            taken = next((j.name for j in mine if j.name in names), None)
            if taken is not None:
                raise Conflict(f"you have an unfinished job called {taken!r} already; choose another name")
        # in memory; it learns of new limits in the cycle after their change
        people = self._loop.scheduler.cluster
        limits = [user.limits for user in people.users] + [group.limits for group in people.groups]
        if any(limit.max_waiting_jobs is not None for limit in limits):  # counting all jobs takes long
            why = refusal(people, user, self._waiting(), count)
            if why is not None:
                raise Conflict(why)

    def _waiting(self) -> dict[str, int]:
        """By user: unfinished jobs without GPUs."""
        waits = (j for j in self._loop.jobs.values() if not j.gpus and not j.target_gpus)
        return Counter(j.user for j in waits if j.life.state in (JobState.PENDING, JobState.PAUSED))
