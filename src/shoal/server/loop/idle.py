"""Jobs that hold GPUs without using them: found by what they do, named, and acted on if the operator asks for it.

A job with real GPUs is idle while all of them are. On virtual GPUs, and where the use of a GPU is not known, the steps
of a live job and the CPU time of the workers on this machine count. A job of which nothing can be known is never idle.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from shoal.core.events import Capped, Event
from shoal.core.words import counted, spoken
from shoal.executors.base import Executor, GpuUsage
from shoal.executors.cpu_time import cpu_seconds
from shoal.server.api.models import JobState
from shoal.server.loop.caps import IDLE, Caps
from shoal.server.loop.lifecycle import Verb, apply, may
from shoal.server.loop.live_job import ACTIVE, LiveJob, LiveWorker
from shoal.server.loop.outbox import Outbox

log = logging.getLogger("shoal.server")

LOOK_S = 5.0
#: Per cent of a GPU, and part of one CPU, below which a worker does nothing.
BUSY_ABOVE, CPU_ABOVE = 1.0, 0.01


@dataclass(frozen=True, slots=True)
class IdleRule:
    """After how long a job counts as idle, and what happens then."""

    after_s: float = 600.0
    #: One of `options.IDLE_ACTIONS`.
    action: str = "notify"


@dataclass(slots=True)
class _Seen:
    """What was last seen of a job."""

    busy_s: float
    step: int | None
    cpu_s: dict[str, float]
    looked_s: float
    told: bool = False
    capped: bool = False


class IdleLoop(Protocol):
    """What this needs of the control loop."""

    @property
    def is_running(self) -> bool: ...

    @property
    def settle_soon(self) -> Callable[[], None]: ...

    @property
    def caps(self) -> Caps: ...

    def now_s(self) -> float: ...

    def take_in(self, *events: Event) -> None: ...

    def hold(self, job: LiveJob) -> None: ...

    def worker_directory(self, job_id: int, worker_id: str) -> Path: ...


class Idle:
    def __init__(
        self, loop: IdleLoop, jobs: Mapping[int, LiveJob], executor: Executor, outbox: Outbox, rule: IdleRule
    ) -> None:
        self._loop, self._jobs, self._executor, self._outbox = loop, jobs, executor, outbox
        self.rule = rule
        self._seen: dict[int, _Seen] = {}
        self._task: asyncio.Task[None] | None = None

    def start(self, caps: Mapping[int, Capped]) -> None:
        """`caps`: of the last server. It may have shrunk idle jobs, which are seen anew now."""
        for job_id in caps:
            if job_id in self._jobs and not self._jobs[job_id].spec.get("autoscale"):
                self._loop.take_in(Capped(job_id, None))
        self._task = asyncio.create_task(self._look_regularly())

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def idle_s(self, job: LiveJob) -> float | None:
        """How long the job has held GPUs without using them, if that is long enough to be told."""
        seen = self._seen.get(job.id)
        if seen is None or not job.gpus:
            return None
        idle_s = self._loop.now_s() - seen.busy_s
        return idle_s if idle_s >= self.rule.after_s else None

    async def _look_regularly(self) -> None:
        while True:
            await asyncio.sleep(min(LOOK_S, self.rule.after_s / 2))
            if not self._loop.is_running:
                continue
            try:
                used = await asyncio.to_thread(self._executor.usage)
                wanted = self._workers(used)
                cpu_s = await asyncio.to_thread(cpu_seconds, wanted)
                self.take(used, cpu_s)
            except Exception:
                log.exception("cannot tell which jobs are idle; looking again in %g s", LOOK_S)

    def _workers(self, used: Mapping[tuple[str, int], GpuUsage]) -> dict[str, Path]:
        """The workers whose CPU time matters, with their directories: those on GPUs of unknown use."""
        return {
            worker.id: self._loop.worker_directory(job.id, worker.id)
            for job in self._jobs.values()
            for worker in job.workers.values()
            if worker.state == ACTIVE and not _is_seen(worker, used)
        }

    # -- what jobs do ------------------------------------------------------------------------------

    def take(self, used: Mapping[tuple[str, int], GpuUsage], cpu_s: Mapping[str, float]) -> None:
        """What GPUs and workers did up to this moment."""
        now_s = self._loop.now_s()
        for gone in self._seen.keys() - self._jobs.keys():
            del self._seen[gone]
        for job in list(self._jobs.values()):
            workers = [w for w in job.workers.values() if w.holds_gpu]
            if job.life.state is not JobState.RUNNING or not workers:
                self._forget(job)
                continue
            gpus = [used[gpu] for w in workers for gpu in _gpus(w) if gpu in used]
            unseen = [w.id for w in workers if not _is_seen(w, used)]
            seen = self._seen.get(job.id)
            mine = {w: cpu_s[w] for w in unseen if w in cpu_s}
            if seen is None:
                self._seen[job.id] = _Seen(now_s, job.progress.step, mine, now_s)
                continue
            if self._is_busy(job, seen, gpus, mine, len(unseen), now_s):
                self._busy(job, seen, now_s)
            seen.step, seen.cpu_s, seen.looked_s = job.progress.step, mine, now_s
            if now_s - seen.busy_s >= self.rule.after_s and not seen.told:
                self._tell(job, seen, now_s - seen.busy_s)

    def _is_busy(
        self,
        job: LiveJob,
        seen: _Seen,
        gpus: list[GpuUsage],
        cpu_s: Mapping[str, float],
        unseen: int,
        now_s: float,
    ) -> bool:
        """Whether the job did something since the last look. What is not known counts as busy.

        `unseen`: its workers with a GPU of which the use is not known, so that their CPU time counts.
        """
        if job.progress.step != seen.step or any(gpu.utilisation > BUSY_ABOVE for gpu in gpus):
            return True
        if len(cpu_s) < unseen:
            return True
        passed_s = max(now_s - seen.looked_s, 1e-6)
        return any(total - seen.cpu_s.get(w, 0.0) > CPU_ABOVE * passed_s for w, total in cpu_s.items())

    def _forget(self, job: LiveJob) -> None:
        seen = self._seen.pop(job.id, None)
        if seen is not None and seen.capped:
            self._loop.caps.drop(job, IDLE)

    def _busy(self, job: LiveJob, seen: _Seen, now_s: float) -> None:
        seen.busy_s = now_s
        if seen.told:
            seen.told = False
            self._event("job.busy", "it uses its GPUs again", job)
        if seen.capped:
            seen.capped = False
            self._loop.caps.drop(job, IDLE)

    # -- what follows ------------------------------------------------------------------------------

    def _tell(self, job: LiveJob, seen: _Seen, idle_s: float) -> None:
        seen.told = True
        if self.rule.action == "none":
            return
        them = "it" if job.gpus == 1 else "them"
        what = f"it has held {counted(job.gpus, 'GPU')} for {spoken(idle_s)} without using {them}"
        if self.rule.action == "shrink" and job.gpus > job.min_gpus and not job.spec.get("autoscale"):
            seen.capped = True
            why = f"{what}, so it has its minimum until it uses them"
            self._loop.caps.put(job, IDLE, job.min_gpus, why)
            what += f"; it shrinks to its minimum of {job.min_gpus}"
        elif self.rule.action == "pause" and may(job.life, Verb.HOLD):
            job.life = apply(job.life, Verb.HOLD, self._loop.now_s(), f"paused: {what}")
            self._outbox.job(job)
            self._event(Verb.HOLD.value, f"paused: {what}", job)
            self._loop.hold(job)
        self._event("job.idle", what, job, idle_s=idle_s, gpus=job.gpus, action=self.rule.action)

    def _event(self, type_: str, text: str, job: LiveJob, **data: Any) -> None:
        self._outbox.event(type_, text, job, **data)
        self._loop.settle_soon()


def _gpus(worker: LiveWorker) -> list[tuple[str, int]]:
    """All GPUs of a worker, by the name of its node: one process may use several."""
    return [(worker.node, gpu) for _, gpu in worker.devices]


def _is_seen(worker: LiveWorker, used: Mapping[tuple[str, int], GpuUsage]) -> bool:
    """Whether the use of every GPU of the worker is known."""
    return all(gpu in used for gpu in _gpus(worker))
