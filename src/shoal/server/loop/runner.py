"""The interface of runners, and what the two kinds share: starting, stopping and accounting for workers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence, Set
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from shoal.executors.base import Executor, Exit, NodeInfo, WorkerSpec
from shoal.server.api.models import JobState
from shoal.server.home import Home
from shoal.server.loop.devices import Device, Devices
from shoal.server.loop.lifecycle import Verb, apply, hold_gpus, may
from shoal.server.loop.live_job import LEAVING, SUSPENDED, LiveJob, LiveWorker
from shoal.server.loop.outbox import Outbox
from shoal.server.loop.profiles import Profiles
from shoal.server.loop.searches import Searches
from shoal.server.loop.sharing import Sharing
from shoal.server.metrics import Metrics
from shoal.server.store.store import Store


class Runner(Protocol):
    """Moves the workers of one kind of job towards the job's target."""

    def reconcile(self, job: LiveJob) -> None:
        """Take the next step towards the job's target."""

    def exited(self, job: LiveJob, worker: LiveWorker, exit_: Exit) -> None:
        """A worker has ended; it is no longer among the job's workers and its GPU is free."""

    def cancel(self, job: LiveJob) -> None:
        """Its owner ends the job."""

    def conclude_rest(self, job: LiveJob) -> None:
        """End a job whose outcome is recorded and whose last worker ended just before the last server was killed."""

    def repeat_orders(self, job: LiveJob) -> None:
        """Repeat the orders of this kind of runner other than stop and suspend, after a restart."""

    def shut_down(self, job: LiveJob) -> None:
        """Stop the job's workers because the server shuts down. The job continues with the next server."""

    def holds(self, job: LiveJob) -> None:
        """Account for the number of GPUs that the job has now."""

    async def open(self) -> None:
        """The server starts. The jobs of the last server are known."""

    async def close(self) -> None:
        """The server ends."""


@dataclass(frozen=True)
class Parts:
    """The parts of the server that runners work with."""

    outbox: Outbox
    devices: Devices
    executor: Executor
    home: Home
    store: Store
    nodes: Sequence[NodeInfo]
    jobs: Mapping[int, LiveJob]
    metrics: Metrics
    profiles: Profiles
    searches: Searches
    sharing: Sharing
    #: Indexes of the nodes that are out of use.
    drained: Set[int]
    #: Jobs that wait for GPUs which others have not released yet.
    unmet: set[int]
    warnings: list[str]

    def worker_directory(self, job_id: int, worker_id: str) -> Path:
        return self.home.job(job_id) / "workers" / worker_id


class RunnerLoop(Protocol):
    """What runners need of the control loop."""

    @property
    def stopping(self) -> bool: ...

    def now_s(self) -> float: ...

    def then_s(self, job: LiveJob) -> float:
        """The time of the event being taken in: now, or earlier if it happened while no server ran."""

    def as_of(self, then_s: float) -> AbstractContextManager[None]: ...

    def soon(self, job: LiveJob) -> None: ...

    def gpus_freed(self) -> None: ...

    def job_over(self, job: LiveJob) -> None: ...


class RunnerBase:
    def __init__(self, loop: RunnerLoop, parts: Parts) -> None:
        self.loop, self.parts = loop, parts

    def advance(self, job: LiveJob, verb: Verb, message: str | None = None, **data: object) -> None:
        """Move the job to its next state, and record the state and its event."""
        first = verb is Verb.START and job.life.started_s is None
        job.life = apply(job.life, verb, self.loop.then_s(job), message)
        if first:
            self.parts.metrics.queue_wait.labels(user=job.user).observe(job.life.waiting_s)
        self.parts.outbox.job(job)
        self.parts.outbox.event(verb.value, message or _SENTENCE[verb], job, **data)

    async def open(self) -> None:
        pass

    async def close(self) -> None:
        pass

    def new_worker(
        self, job: LiveJob, device: Device, rank: int | None, *, colocated: bool = False
    ) -> LiveWorker:
        """A new worker on a free GPU or, if `colocated`, on a GPU that another job holds."""
        worker = LiveWorker(
            job.new_worker_id(),
            device,
            self.parts.nodes[device[0]].name,
            self.loop.now_s(),
            rank,
            colocated=colocated,
        )
        job.workers[worker.id] = worker
        if colocated:
            self.parts.devices.colocate(device, worker.id)
        else:
            self.parts.devices.give(device, worker.id)
        job.colocated = colocated
        self.parts.outbox.new_worker(job, worker)
        self.holds(job)
        return worker

    def holds(self, job: LiveJob) -> None:
        """Account for the GPUs it has from now on."""
        job.life = hold_gpus(job.life, job.gpus, self.loop.then_s(job))
        self.parts.outbox.job(job)
        self.parts.outbox.snapshot_due()

    def start(self, job: LiveJob, worker: LiveWorker, env: dict[str, str], *, warm: bool = False) -> None:
        spec = WorkerSpec(
            worker=worker.id,
            directory=self.parts.worker_directory(job.id, worker.id),
            node=worker.node,
            gpu=worker.device[1],
            command=tuple(job.spec["command"]),
            workdir=job.spec["workdir"],
            env=dict(job.spec["env"])
            | secrets_of(self.parts.home.job(job.id))
            | self._names(job, worker)
            | env,
            grace_s=job.spec["grace_s"],
            warm=warm,
        )
        self.parts.outbox.event("worker.started", f"worker {worker.id} starts on {worker.node}", job,
                            worker=worker.id, node=worker.node, gpu=worker.device[1])  # fmt: skip
        self.parts.outbox.effect(lambda: self.parts.executor.start(spec))

    def _names(self, job: LiveJob, worker: LiveWorker) -> dict[str, str]:
        memory_mb = (job.needs or {}).get("gpu_mem_mb")
        return ({} if memory_mb is None else {"SHOAL_GPU_MEM_MB": f"{memory_mb:g}"}) | {
            "SHOAL_JOB": str(job.id),
            "SHOAL_JOB_NAME": job.name,
            "SHOAL_JOB_DIR": str(self.parts.home.job(job.id)),
            "SHOAL_USER": job.user,
            "SHOAL_WORKER": worker.id,
            "SHOAL_GPU": str(worker.device[1]),
        }

    def stop(self, job: LiveJob, worker: LiveWorker, *, kill: bool = False) -> None:
        # A suspended worker has no GPU. Another may have it, so it must not count as held again.
        if worker.state not in (LEAVING, SUSPENDED):
            worker.state = LEAVING
            self.parts.outbox.worker(worker.id, state=LEAVING)
        self.parts.outbox.effect(lambda: self.parts.executor.stop(worker.id, kill=kill))

    def conclude_rest(self, job: LiveJob) -> None:
        self.conclude(job)

    def repeat_orders(self, job: LiveJob) -> None:
        pass

    def conclude(self, job: LiveJob) -> None:
        """All workers of a failed job have ended: restart it if it may, else it has failed."""
        why, job.ending = job.ending or "it failed", None
        if job.life.state is JobState.STOPPING:
            self.over(job, Verb.VANISH)
        elif job.life.restarts < job.spec["max_restarts"] and may(job.life, Verb.RESTART):
            self.advance(job, Verb.RESTART, f"{why}; it is started again", why=why)
            self.loop.soon(job)
        else:
            self.over(job, Verb.FAIL, why)

    def over(self, job: LiveJob, verb: Verb, message: str | None = None) -> None:
        """The job has ended, and none of its processes is left."""
        self.advance(job, verb, message, exit_code=job.exit_code, signal=job.signal)
        self.loop.job_over(job)


_SENTENCE = {
    Verb.START: "its workers start",
    Verb.RUN: "it runs",
    Verb.PREEMPT: "the scheduler gave its GPUs to others",
    Verb.RESTART: "it is started again",
    Verb.HOLD: "its owner paused it",
    Verb.RELEASE: "its owner resumed it",
    Verb.CANCEL: "its owner cancelled it",
    Verb.SUCCEED: "it is done",
    Verb.FAIL: "it failed",
    Verb.VANISH: "it was cancelled",
}


def describe_exit(exit_: Exit) -> str:
    """How a worker ended, in words."""
    if exit_.signal is not None:
        return f"worker {exit_.worker} was ended by {exit_.signal}"
    if exit_.code is None or (exit_.code in (126, 127) and exit_.why):
        return f"worker {exit_.worker}: {exit_.why}"
    return f"worker {exit_.worker} ended with exit code {exit_.code}"


def secrets_of(directory: Path) -> dict[str, str]:
    try:
        found = json.loads((directory / "secrets.json").read_text())
    except OSError:
        return {}
    return {str(k): str(v) for k, v in found.items()}
