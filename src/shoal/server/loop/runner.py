"""The interface of runners, and what the two kinds share: starting, stopping and accounting for workers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from shoal.executors.base import Executor, Exit, NodeInfo, RunAs, WorkerSpec
from shoal.executors.logs import read_lines, tail_position
from shoal.server.api.models import JobState, is_reserved
from shoal.server.home import Home
from shoal.server.loop.ceilings import Ceilings
from shoal.server.loop.devices import Device, Devices
from shoal.server.loop.experiment import tracker_environment
from shoal.server.loop.lifecycle import Verb, apply, hold_gpus, may
from shoal.server.loop.live_job import LEAVING, SUSPENDED, LiveJob, LiveWorker
from shoal.server.loop.outbox import Outbox
from shoal.server.loop.profiles import Profiles
from shoal.server.loop.restarts import Cause, Restarts, may_restart
from shoal.server.loop.searches import Searches
from shoal.server.loop.sharing.sharing import Sharing
from shoal.server.metrics import Metrics
from shoal.server.store.store import Store
from shoal.wire.regular_file import read_regular

log = logging.getLogger("shoal.server")

#: Holds the GPUs of an interactive job, whose command runs in a session.
HOLDER = ("sleep", "infinity")
#: Lines of a failed worker's output that are searched for a traceback, and recorded if there is none.
LAST_LINES, LAST_LINES_SHOWN = 60, 10


class Runner(Protocol):
    """Moves the workers of one kind of job towards the job's target."""

    def reconcile(self, job: LiveJob) -> None:
        """Take the next step towards the job's target."""

    def exited(self, job: LiveJob, worker: LiveWorker, exit_: Exit) -> None:
        """A worker has ended; it is no longer among the job's workers and its GPU is free."""

    def cancel(self, job: LiveJob) -> None:
        """Its owner ends the job."""

    def end(self, job: LiveJob, why: str) -> None:
        """End the job as failed, without a restart."""

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


@dataclass(slots=True)
class Addresses:
    """Where the workers of live jobs reach the control plane."""

    #: Of workers on this machine.
    here: str = ""
    #: Of all others, inside TLS with the certificate that has this fingerprint.
    elsewhere: str = ""
    fingerprint: str = ""
    #: Whether a node on another machine was proved to share the directory of the jobs' state.
    shares_state: Callable[[str], bool] = lambda node: False

    def state_env(self, node: NodeInfo, directory: Path, *, proved: bool) -> dict[str, str]:
        """Where a worker may write the state of its job. Without a proof, it goes through the control plane.

        `proved`: the directory is in the one that machines were asked about.
        """
        shared = not node.remote or (proved and self.shares_state(node.name))
        return {"SHOAL_STATE_DIR": str(directory)} if shared else {}

    def env(self, node: NodeInfo) -> dict[str, str]:
        if not node.remote:
            return {"SHOAL_CONTROL": self.here}
        return {"SHOAL_CONTROL": self.elsewhere, "SHOAL_CONTROL_CERTIFICATE": self.fingerprint}


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
    restarts: Restarts
    ceilings: Ceilings
    #: Indexes of the nodes that no job may use.
    out_of_use: Set[int]
    #: Indexes of the nodes whose machines will be taken away.
    leaving: Set[int]
    #: Jobs that wait for GPUs which others have not released yet.
    unmet: set[int]
    warnings: list[str]
    addresses: Addresses
    #: The account under which the jobs of a user run.
    account_of: Callable[[str], RunAs]

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
        self,
        job: LiveJob,
        device: Device,
        rank: int | None,
        *,
        more: Sequence[Device] = (),
        colocated: bool = False,
    ) -> LiveWorker:
        """A new worker on a free GPU, and `more` of its node; if `colocated`, on a GPU that another job holds."""
        worker = LiveWorker(
            job.new_worker_id(),
            device,
            self.parts.nodes[device[0]].name,
            self.loop.now_s(),
            rank,
            colocated=colocated,
            more_gpus=tuple(gpu for _, gpu in more),
        )
        job.workers[worker.id] = worker
        if colocated:
            self.parts.devices.colocate(device, worker.id)
        else:
            for held in worker.devices:
                self.parts.devices.give(held, worker.id)
        job.colocated = colocated
        self.parts.outbox.new_worker(job, worker)
        self.holds(job)
        return worker

    def choose(
        self, job: LiveJob, need: dict[int, int], leavers: Sequence[LiveWorker] = ()
    ) -> list[Device] | None:
        """Free GPUs for the job, by node; None if they are not free, or a limit does not let it hold them yet.

        `leavers`: its workers that leave when the new ones have joined.
        """
        if not self.parts.ceilings.allow(job, need, leavers):
            return None
        return self.parts.devices.choose(need, self.parts.sharing.beside(job))

    def end(self, job: LiveJob, why: str) -> None:
        """End the job as failed, without a restart."""
        job.ending = why
        self.parts.outbox.job(job)
        for worker in job.workers.values():
            self.stop(job, worker)

    def holds(self, job: LiveJob) -> None:
        """Account for the GPUs it has from now on."""
        job.life = hold_gpus(job.life, job.gpus, self.loop.then_s(job))
        self.parts.outbox.job(job)
        self.parts.outbox.snapshot_due()

    def start(
        self,
        job: LiveJob,
        worker: LiveWorker,
        env: dict[str, str],
        *,
        warm: bool = False,
        gpus: tuple[int, ...] = (),
        secret_files: dict[str, str] | None = None,
        waits_for_go: bool = False,
        port: int | None = None,
    ) -> None:
        spec = WorkerSpec(
            worker=worker.id,
            directory=self.parts.worker_directory(job.id, worker.id),
            node=worker.node,
            gpu=worker.device[1],
            command=HOLDER if job.spec.get("interactive") else tuple(job.spec["command"]),
            workdir=job.spec["workdir"],
            env=tracker_environment(job)
            | dict(job.spec["env"])
            | secrets_of(self.parts.home.job(job.id))
            | self._names(job, worker)
            | env,
            grace_s=job.spec["grace_s"],
            warm=warm,
            tree=job.spec.get("tree") or "",
            gpus=gpus,
            secret_files=secret_files or {},
            waits_for_go=waits_for_go,
            port=port,
            account=self.parts.account_of(job.user),
        )
        self.parts.outbox.event("worker.started", f"worker {worker.id} starts on {worker.node}", job,
                            worker=worker.id, node=worker.node, gpu=worker.device[1],
                            gpus=[gpu for _, gpu in worker.devices])  # fmt: skip
        self.parts.outbox.effect(lambda: self._start_or_report(spec))

    def _start_or_report(self, spec: WorkerSpec) -> None:
        """Whatever goes wrong here, the job must not wait for this worker for ever."""
        executor = self.parts.executor
        try:
            executor.start(spec)
        except Exception as error:
            log.exception("worker %s was not started", spec.worker)
            with contextlib.suppress(Exception):
                executor.stop(spec.worker, kill=True)
            exit_ = Exit(spec.worker, None, None, f"cannot start it: {error}", began=False)
            asyncio.get_running_loop().call_soon(executor.on_exit, exit_)

    def _names(self, job: LiveJob, worker: LiveWorker) -> dict[str, str]:
        memory_mb = (job.needs or {}).get("gpu_mem_mb")
        # Other machines do not have the directory: what a job writes there must not be lost with a node.
        here = not self.parts.nodes[worker.device[0]].remote
        directory = {"SHOAL_JOB_DIR": str(self.parts.home.job(job.id))} if here else {}
        return (
            directory
            | ({} if memory_mb is None else {"SHOAL_GPU_MEM_MB": f"{memory_mb:g}"})
            | {
                "SHOAL_JOB": str(job.id),
                "SHOAL_JOB_NAME": job.name,
                "SHOAL_USER": job.user,
                "SHOAL_WORKER": worker.id,
                "SHOAL_GPU": str(worker.device[1]),
                "SHOAL_GPU_TYPE": self.parts.nodes[worker.device[0]].gpu_type,
                **_task_names(job),
            }
        )

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
        elif job.timed_out or not self.start_again(job, Cause.FAILED, why):
            self.over(job, Verb.FAIL, why + times(job))

    def start_again(self, job: LiveJob, cause: Cause, why: str) -> bool:
        """Start the job again after a rest. False if it may not."""
        if not may_restart(job, cause) or not may(job.life, Verb.RESTART):
            return False
        rest_s = self.parts.restarts.rest(job)
        text = f"{why}; it is started again in {rest_s:.0f} s"
        if cause is not Cause.UNBEGUN:
            self.advance(job, Verb.RESTART, text, why=why, rest_s=rest_s)
        elif may(job.life, Verb.PREEMPT):
            self.advance(job, Verb.PREEMPT, text, why=why, rest_s=rest_s)
        self.loop.soon(job)
        return True

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


def times(job: LiveJob) -> str:
    """How often the job was started again before it failed for good."""
    n = job.life.restarts
    return f" (it was started again {'once' if n == 1 else f'{n} times'} before)" if n else ""


def _task_names(job: LiveJob) -> dict[str, str]:
    """Which task of its array a job is."""
    if job.array is None:
        return {}
    task = job.spec["task"]
    return {
        "SHOAL_ARRAY": str(job.array),
        "SHOAL_ARRAY_NAME": task["name"],
        "SHOAL_ARRAY_INDEX": str(job.array_index),
        "SHOAL_ARRAY_TASKS": str(task["tasks"]),
    } | {f"SHOAL_SWEEP_{_env_word(key)}": str(value) for key, value in task["values"].items()}


def _env_word(key: str) -> str:
    return "".join(c if c.isalnum() else "_" for c in key).upper()


def describe_exit(exit_: Exit) -> str:
    """How a worker ended, in words."""
    if exit_.node_lost:
        return f"worker {exit_.worker}: {exit_.why}"
    if exit_.signal is not None:
        return f"worker {exit_.worker} was ended by {exit_.signal}"
    if exit_.code is None or (exit_.code in (126, 127) and exit_.why):
        return f"worker {exit_.worker}: {exit_.why}"
    last = f": {exit_.why}" if exit_.code and exit_.why else ""
    return f"worker {exit_.worker} ended with exit code {exit_.code}{last}"


def last_words(directory: Path) -> list[str]:
    """What a worker printed last: its traceback, or its last lines."""
    lines = [
        line.text for line in read_lines(directory, tail_position(directory, LAST_LINES)) if line.text.strip()
    ]
    begin = max(
        (i for i, text in enumerate(lines) if text.startswith("Traceback (most recent")), default=None
    )
    return lines[-LAST_LINES_SHOWN:] if begin is None else lines[begin:]


def secrets_of(directory: Path) -> dict[str, str]:
    try:
        found = json.loads(read_regular(directory / "secrets.json"))
    except (OSError, ValueError):  # a job under the server's account may have changed it
        return {}
    # A variable that Shoal sets says what the job may see: it was refused when the job was submitted.
    return {str(k): str(v) for k, v in found.items() if not is_reserved(k)} if isinstance(found, dict) else {}
