"""Change a job: cancel, pause, resume, scale, ask for a checkpoint."""

from __future__ import annotations

import asyncio
from typing import Protocol

from shoal.core.events import Event, Rescaled
from shoal.scheduler.scheduler import Scheduler
from shoal.server.api.models import JobState, Scale
from shoal.server.loop.lifecycle import Verb, apply
from shoal.server.loop.live_job import LiveJob
from shoal.server.loop.profiles import Profiles
from shoal.server.loop.searches import Searches
from shoal.server.services.engine_view import EngineView
from shoal.server.services.errors import Conflict
from shoal.server.services.sizes import new_size
from shoal.server.store.store import Store

_DONE = {Verb.HOLD: "paused", Verb.RELEASE: "resumed", Verb.CANCEL: "cancelled"}


class ChangeLoop(Protocol):
    """What changing a job needs of the control loop."""

    @property
    def scheduler(self) -> Scheduler: ...

    def now_s(self) -> float: ...

    def post(self, *events: Event) -> None: ...

    def cancel(self, job: LiveJob) -> None: ...

    def hold(self, job: LiveJob) -> None: ...

    def release(self, job: LiveJob) -> None: ...

    def kill(self, worker_id: str) -> None: ...

    def ask_checkpoint(self, job: LiveJob) -> bool: ...


class ChangeJob:
    def __init__(
        self, loop: ChangeLoop, store: Store, profiles: Profiles, searches: Searches, engine: EngineView
    ) -> None:
        self._loop, self._store, self._engine = loop, store, engine
        self._profiles, self._searches = profiles, searches

    def cancel(self, job: LiveJob, actor: str, grace_s: float | None = None) -> None:
        """End the job. With `grace_s`, kill the workers that are left after that time."""
        if job.life.state is not JobState.STOPPING:
            self._change(job, Verb.CANCEL, actor)
            self._loop.cancel(job)
        if grace_s is not None:
            for worker_id in list(job.workers):
                asyncio.get_running_loop().call_later(grace_s, self._loop.kill, worker_id)

    def pause(self, job: LiveJob, actor: str) -> None:
        if job.life.state is not JobState.PAUSED:
            self._change(job, Verb.HOLD, actor)
            self._loop.hold(job)

    def resume(self, job: LiveJob, actor: str) -> None:
        if job.life.state is not JobState.PAUSED:
            raise Conflict(f"it is {job.life.state.value}, not paused")
        self._change(job, Verb.RELEASE, actor)
        self._loop.release(job)

    def checkpoint(self, job: LiveJob) -> None:
        if not job.gpus or not self._loop.ask_checkpoint(job):
            raise Conflict("only a running job that uses shoal.torch can be asked for a checkpoint")

    def _change(self, job: LiveJob, verb: Verb, actor: str) -> None:
        message, now_s = f"{_DONE[verb]} by {actor}", self._loop.now_s()
        life = apply(job.life, verb, now_s, message)
        with self._store.change(now_s, actor=actor) as change:
            change.update_job(
                job.id,
                state=life.state.value,
                message=life.message,
                settled_s=life.settled_s,
                waiting_s=life.waiting_s,
                running_s=life.running_s,
                paused_s=life.paused_s,
                gpu_s=life.gpu_s,
            )
            change.event(verb.value, message, job=job.id, user=job.user)
        job.life = life

    def scale(self, job: LiveJob, scale: Scale, actor: str) -> None:
        """Change the job's range of GPUs. Bounds that `scale` leaves out stay."""
        gpus, requested = new_size(job, scale, self._loop.scheduler.cluster, self._engine)
        before = job.range
        with self._store.change(self._loop.now_s(), actor=actor) as change:
            change.update_job(job.id, min_gpus=gpus.min, max_gpus=gpus.max, requested_gpus=requested)
            change.event(
                "job.scaled", f"range changed from {before} to {gpus} by {actor}", job=job.id, user=job.user,
                data={"from": str(before), "to": str(gpus)},
            )  # fmt: skip
        job.min_gpus, job.max_gpus, job.requested_gpus = gpus.min, gpus.max, requested
        # The scheduler may not know the job yet: its submission is then earlier in the same inbox.
        profile = self._profiles.profile(job)
        capped = self._searches.rescaled(job)
        self._loop.post(Rescaled(job.id, gpus.min, gpus.max, requested, profile), *capped)
