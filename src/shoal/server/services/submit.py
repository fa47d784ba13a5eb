"""Submit a job: check it, choose its size if it leaves that open, record it, and tell the control loop."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from shoal.core.events import Event, Submitted
from shoal.core.job import GpuRange
from shoal.knowledge.auto_gpus import AutoGpus
from shoal.knowledge.size_search import Autoscale
from shoal.scheduler.scheduler import Scheduler
from shoal.server.api.models import AUTO, JobSpec, JobState
from shoal.server.home import Home, write_atomically
from shoal.server.loop.lifecycle import Life
from shoal.server.loop.live_job import LiveJob
from shoal.server.loop.profiles import Profiles
from shoal.server.loop.searches import Searches
from shoal.server.services.auto import auto_gpus
from shoal.server.services.errors import Conflict
from shoal.server.services.feasible import feasible_range, most_gpus
from shoal.server.services.naming import hash_of, model_word, short_name
from shoal.server.services.needs import given_needs, learned_needs
from shoal.server.store.store import Change, Store, StoreFull

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
    ) -> None:
        """`learns_needs`: whether GPUs may be shared, so that what a job needs of one matters."""
        self._loop, self._store, self._home = loop, store, home
        self._profiles, self._searches = profiles, searches
        self._learns_needs = learns_needs

    async def submit(self, spec: JobSpec, user: str, *, key: str | None = None) -> tuple[int, bool]:
        """(id, whether it is new). With a key, the same submission again returns the same job."""
        size = await self.auto_gpus(spec, user)
        needs = await self._needs(spec, user)
        return self._submit(spec, user, key, size, needs)

    async def auto_gpus(self, spec: JobSpec, user: str) -> AutoGpus | None:
        """The size chosen for a job that leaves it open (`gpus: auto`); None for others."""
        if spec.gpus != AUTO:
            return None
        most = most_gpus(spec, self._loop.scheduler.cluster)
        return await auto_gpus(self._store, self._profiles, spec, user, most)

    def range_of(self, spec: JobSpec) -> GpuRange:
        """Its range of GPUs; Infeasible if the cluster could never run it."""
        return feasible_range(spec, self._loop.scheduler.cluster)

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
    ) -> tuple[int, bool]:
        body_hash = hash_of(spec.model_dump_json())
        if key is not None and (before := self._store.idempotent(user, key)) is not None:
            if before["body_hash"] != body_hash:
                raise Conflict("this idempotency key was used for another job; use a new one")
            return before["job"], False
        if size is not None:
            spec = spec.model_copy(update={"gpus": str(size.gpus)})
        gpus = self.range_of(spec)
        if spec.autoscale:
            Autoscale.parse(spec.autoscale)  # raises if it is not understood
        self._check_limits(spec.name, user)
        job = self._record(spec, gpus, user, key, body_hash, size, needs)
        self._loop.jobs[job.id] = job
        core, profile = self._profiles.of(job)
        self._loop.post(Submitted(job.id, core, profile), *self._searches.cap_events(job))
        return job.id, True

    def _check_limits(self, name: str | None, user: str) -> None:
        mine = [j for j in self._loop.jobs.values() if j.user == user]
        if len(mine) >= MAX_ACTIVE_JOBS_OF_USER:
            raise Conflict(f"you have {MAX_ACTIVE_JOBS_OF_USER} unfinished jobs, which is the limit")
        if name is not None and any(j.name == name for j in mine):
            raise Conflict(f"you have an unfinished job called {name!r} already; choose another name")

    def _record(
        self,
        spec: JobSpec,
        gpus: GpuRange,
        user: str,
        key: str | None,
        body_hash: str,
        size: AutoGpus | None,
        needs: dict[str, Any] | None,
    ) -> LiveJob:
        now_s = self._loop.now_s()
        row = self._row(spec, gpus, user, now_s) | {"progress": {"needs": needs}}
        directory: Path | None = None
        try:
            with self._store.change(now_s, actor=user) as change:
                job_id = change.add_job(**row)
                if not row["name"]:
                    row["name"] = f"{short_name(spec.command)}-{job_id}"
                    change.update_job(job_id, name=row["name"])
                directory = self._home.job(job_id)
                _make_directory(directory, spec.secrets)
                if key is not None:
                    change.add_idempotency(user, key, body_hash, job_id)
                _record_events(change, job_id, row, gpus, size)
        except BaseException:
            if directory is not None:
                shutil.rmtree(directory, ignore_errors=True)
            raise
        return LiveJob(
            id=job_id,
            name=row["name"],
            user=user,
            spec=row["spec"],
            given=row["given"],
            min_gpus=row["min_gpus"],
            max_gpus=row["max_gpus"],
            requested_gpus=row["requested_gpus"],
            resize=spec.effective_resize,
            model=row["model"],
            life=Life.begin(now_s),
            needs=needs,
        )

    def _row(self, spec: JobSpec, gpus: GpuRange, user: str, now_s: float) -> dict[str, Any]:
        most = most_gpus(spec, self._loop.scheduler.cluster)
        return {
            "name": spec.name or "",
            "user": user,
            "state": JobState.PENDING.value,
            "spec": spec.model_dump(mode="json", exclude={"secrets"}) | {"secrets": sorted(spec.secrets)},
            "given": sorted(spec.model_fields_set),
            "min_gpus": gpus.min,
            "max_gpus": gpus.max,
            "requested_gpus": spec.requested_gpus or max(min(gpus.max, most), gpus.min),
            "resize": spec.effective_resize.value,
            "model": spec.model or model_word(spec.command),
            "submitted_s": now_s,
            "settled_s": now_s,
        }


def _record_events(
    change: Change, job_id: int, row: dict[str, Any], gpus: GpuRange, size: AutoGpus | None
) -> None:
    wanted = f"{gpus} {'GPU' if gpus.max == 1 else 'GPUs'}"
    change.event(
        "job.submitted", f"submitted {row['name']} with {wanted}", job=job_id, user=row["user"],
        data={"name": row["name"], "gpus": str(gpus), "resize": row["resize"]},
    )  # fmt: skip
    if size is not None:
        change.event(
            "job.sized", f"GPUs: {size.why}", job=job_id, user=row["user"],
            data={"gpus": str(gpus), "known": size.known},
        )  # fmt: skip


def _make_directory(directory: Path, secrets: dict[str, str]) -> None:
    try:
        directory.mkdir(mode=0o700)
        if secrets:
            write_atomically(directory / "secrets.json", json.dumps(secrets))
    except OSError as error:
        raise StoreFull(f"cannot make {directory}: {error.strerror}; nothing was changed") from None
