"""The runner of live jobs, which are resized while they train, through the wire's coordinator.

The runner decides which workers a job has and on which GPUs. The coordinator moves the job from one set of workers to
the next. A GPU is free when the process on it has ended.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

from shoal.executors.base import Exit
from shoal.server.api.models import JobState, Resize
from shoal.server.loop.coordinator_events import DONE, CoordinatorEvents
from shoal.server.loop.lifecycle import Verb, may
from shoal.server.loop.live_job import ACTIVE, LEAVING, MAX_REFUSED, LiveJob, LiveWorker
from shoal.server.loop.runner import Parts, RunnerLoop, describe_exit
from shoal.wire.auth import new_secret, read_secret, write_secret
from shoal.wire.service import ControlService, JobHandle

log = logging.getLogger("shoal.server")

NO_RUNTIME = (
    "its command ended without ever joining the job: a job with a range of GPUs must use shoal.torch; "
    "for any other command say resize `restart`, or give a fixed number of GPUs"
)


class ElasticRunner(CoordinatorEvents):
    """Runs live jobs. It starts and stops the workers that the coordinators of the wire's service ask for."""

    def __init__(self, loop: RunnerLoop, parts: Parts, host: str = "127.0.0.1") -> None:
        super().__init__(loop, parts)
        self._host = host
        self.service = ControlService(self._Starter(self), on_event=self._event)
        self._tasks: set[asyncio.Task[None]] = set()

    class _Starter:
        """The wire's `WorkerStarter`: passes the coordinators' requests to the runner."""

        def __init__(self, runner: ElasticRunner) -> None:
            self.runner = runner

        def start(self, job: str, worker: str) -> None:
            self.runner._start_requested(job, worker)

        def stop(self, job: str, worker: str, kill: bool) -> None:
            self.runner._stop_requested(job, worker, kill)

    async def open(self) -> None:
        """Restore the coordinators and listen on the last server's port, so that its workers reconnect."""
        port = int(self.parts.store.get("control_port", 0))
        for job in self.parts.jobs.values():
            if job.coordinator is not None and job.resize is Resize.LIVE:
                self._handle(job)
        try:
            address = await self.service.start(self._host, port)
        except OSError as error:
            self.parts.warnings.append(f"port {port} of the control channel is taken ({error.strerror})")
            address = await self.service.start(self._host, 0)
        with self.parts.store.change(self.loop.now_s()) as change:
            change.put("control_port", int(address.rpartition(":")[2]))

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await self.service.close()

    def _handle(self, job: LiveJob) -> JobHandle:
        key = str(job.id)
        if key not in self.service.jobs:
            directory = self.parts.home.job(job.id)
            path = directory / "secret"
            if not path.exists():
                write_secret(path, new_secret())
            self.service.add(
                key,
                read_secret(path),
                restore=job.coordinator,
                pause_path=str(directory / "paused.pt"),
                on_change=lambda state: self._remember(job, state),
            )
        return self.service.jobs[key]

    def _remember(self, job: LiveJob, state: dict[str, Any]) -> None:
        job.coordinator = state
        self.parts.outbox.job(job)
        self.parts.outbox.flush()

    # -- towards the target ------------------------------------------------------------------------

    def reconcile(self, job: LiveJob) -> None:
        want = job.wanted
        self.parts.unmet.discard(job.id)
        if job.ending is not None or job.life.state is JobState.STOPPING:
            return
        try:
            handle = self._handle(job)
        except OSError as error:
            self.over(job, Verb.FAIL, f"cannot prepare its directory: {error.strerror}")
            return
        if want:
            self._set_workers(job, handle, want)
        elif job.workers and not handle.state.pausing:
            handle.set_target([])
        elif not job.workers and may(job.life, Verb.PREEMPT):
            self.advance(job, Verb.PREEMPT)

    def _set_workers(self, job: LiveJob, handle: JobHandle, want: dict[int, int]) -> None:
        """Set the job's workers: keep those whose node still counts in the target, and add new ones on free GPUs."""
        coordinator = handle.state
        usable = [
            w
            for w in job.workers.values()
            if w.state != LEAVING and not w.is_replaced and _lives(coordinator, w.id)
        ]
        need, keep = dict(want), []
        for worker in sorted(usable, key=lambda w: w.state != ACTIVE):
            if need.get(worker.device[0], 0) > 0:
                need[worker.device[0]] -= 1
                keep.append(worker)
        need = {node: count for node, count in need.items() if count}
        new: list[LiveWorker] = []
        if need and job.refused < MAX_REFUSED:
            devices = self.parts.devices.choose(need, self.parts.sharing.beside(job))
            if devices is None:
                # All or nothing: a second switch a moment later would cost more than the wait.
                self.parts.unmet.add(job.id)
                return
            if not job.workers and may(job.life, Verb.START):
                self.advance(job, Verb.START, gpus=len(devices))
            new = [self.new_worker(job, device, None) for device in devices]
        kept = {w.id for w in keep}
        # Workers that stay keep their rank order. New workers come last.
        target = [w.id for w in usable if w.id in kept] + [w.id for w in new]
        if target and (tuple(target) != coordinator.target or coordinator.pausing):
            if coordinator.pending is not None:
                self.parts.metrics.superseded.inc()
            try:
                handle.set_target(target)
                self._aimed_s[job.id] = self.loop.now_s()
            except ValueError as error:  # one of them has just ended; its exit reconciles the job again
                log.info("job %s: %s", job.id, error)

    def _start_requested(self, key: str, worker_id: str) -> None:
        job = self.parts.jobs.get(int(key))
        worker = job.workers.get(worker_id) if job is not None else None
        if job is None or worker is None:
            return
        directory = self.parts.home.job(job.id)
        env = {
            "SHOAL_CONTROL": self.service.address,
            "SHOAL_SECRET_FILE": str(directory / "secret"),
            "SHOAL_CHECKPOINT": str(directory / "checkpoint.pt"),
        }
        self.start(job, worker, env, warm=True)

    def _stop_requested(self, key: str, worker_id: str, kill: bool) -> None:
        job = self.parts.jobs.get(int(key))
        worker = job.workers.get(worker_id) if job is not None else None
        if job is None or worker is None:
            return
        view = self.service.jobs[key].state.workers.get(worker_id)
        if kill or view is None or not view.connected:
            self.stop(job, worker, kill=kill)
        else:
            # The coordinator asked it over the wire. If it has not ended after its grace period, it gets a signal.
            self._leaving(worker)
            asyncio.get_running_loop().call_later(job.spec["grace_s"], self._stop_after_grace, worker_id)
        self.loop.soon(job)

    def _stop_after_grace(self, worker_id: str) -> None:
        self.parts.executor.stop(worker_id)

    def cancel(self, job: LiveJob) -> None:
        for worker in job.workers.values():
            self.stop(job, worker)
        handle = self.service.jobs.get(str(job.id))
        if handle is not None:
            handle.stop("cancelled")
        if not job.workers:
            self.over(job, Verb.VANISH)

    def shut_down(self, job: LiveJob) -> None:
        if job.workers:
            self._handle(job).set_target([])
        if may(job.life, Verb.PREEMPT):
            self.advance(job, Verb.PREEMPT, "the server was shut down; it goes on from where it was")

    def ask_checkpoint(self, job: LiveJob) -> None:
        self._handle(job).ask_checkpoint()

    # -- exits -------------------------------------------------------------------------------------

    def exited(self, job: LiveJob, worker: LiveWorker, exit_: Exit) -> None:
        job.exit_code, job.signal = exit_.code, exit_.signal
        handle = self.service.jobs.get(str(job.id))
        if job.ending is None and handle is not None and _finished_unheard(handle, worker, exit_):
            job.ending = DONE  # written in the same transaction as the end of this worker
            self.parts.outbox.job(job)
        task = asyncio.get_running_loop().create_task(self._exited(job, worker, exit_, self.loop.then_s(job)))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _exited(self, job: LiveJob, worker: LiveWorker, exit_: Exit, then_s: float) -> None:
        handle = self.service.jobs.get(str(job.id))
        if handle is not None:
            view = handle.state.workers.get(worker.id)
            if view is not None and not exit_.began:
                # The last server was killed before it started this worker, so the script did not fail.
                view.stopping = True
            await handle.take_in_exit(worker.id, describe_exit(exit_))
        if not job.is_over:
            with self.loop.as_of(then_s):
                self._after_exit(job, worker, handle, exit_)
        self.loop.soon(job)

    def _after_exit(self, job: LiveJob, worker: LiveWorker, handle: JobHandle | None, exit_: Exit) -> None:
        by_itself = exit_.began and not exit_.asked_to_end and worker.state != LEAVING
        newborn = job.generation == 0 and job.ending is None and by_itself
        if newborn and job.life.state is not JobState.STOPPING and not (exit_.ok and job.workers):
            job.ending = NO_RUNTIME if exit_.ok else describe_exit(exit_)
            self.parts.outbox.job(job)
            if handle is not None:
                handle.stop(job.ending)
        if not job.workers:
            self._all_workers_ended(job)

    def conclude_rest(self, job: LiveJob) -> None:
        self._all_workers_ended(job)

    def _all_workers_ended(self, job: LiveJob) -> None:
        if job.ending == DONE:
            self.over(job, Verb.SUCCEED)
        elif job.life.state is JobState.STOPPING:
            self.over(job, Verb.VANISH)
        elif job.ending == NO_RUNTIME:
            self.over(job, Verb.FAIL, NO_RUNTIME)
        elif job.ending is not None:
            self._forget_coordinator(job)
            self.conclude(job)
        elif not job.wanted and may(job.life, Verb.PREEMPT):
            self.advance(job, Verb.PREEMPT)

    def _forget_coordinator(self, job: LiveJob) -> None:
        """Drop the coordinator of a failed job. If the job restarts, a new one begins from the last checkpoint."""
        if str(job.id) not in self.service.jobs:
            return
        before = self.service.jobs[str(job.id)].state
        self.service.remove(str(job.id))
        job.coordinator, job.generation = None, 0
        if job.life.restarts < job.spec["max_restarts"]:
            after = self._handle(job).state
            after.checkpoint, after.checkpoint_step = before.checkpoint, before.checkpoint_step

    def over(self, job: LiveJob, verb: Verb, message: str | None = None) -> None:
        job.coordinator = None
        super().over(job, verb, message)
        self._aimed_s.pop(job.id, None)
        for key in [k for k in self._pauses if k[0] == job.id]:
            del self._pauses[key]
        if str(job.id) in self.service.jobs:
            self.service.remove(str(job.id))

    def heartbeat_age_s(self) -> dict[str, float]:
        """By node: the age of the oldest heartbeat of its workers, in seconds."""
        ages: dict[str, float] = {}
        for key, handle in self.service.jobs.items():
            job = self.parts.jobs.get(int(key))
            for view in handle.state.workers.values():
                worker = job.workers.get(view.worker) if job is not None else None
                if worker is not None and view.connected:
                    age_s = max(time.monotonic() - view.heard_s, 0.0)
                    ages[worker.node] = max(ages.get(worker.node, 0.0), age_s)
        return ages


def _finished_unheard(handle: JobHandle, worker: LiveWorker, exit_: Exit) -> bool:
    """Whether the worker's script finished while no server was running.

    This is so if the worker had joined the job, ended by itself with exit code 0, and never sent a message to this
    server.
    """
    view = handle.state.workers.get(worker.id)
    unheard = view is not None and view.met and view.status.seq == 0
    return unheard and exit_.ok and not exit_.asked_to_end and worker.state != LEAVING


def _lives(coordinator: Any, worker_id: str) -> bool:
    view = coordinator.workers.get(worker_id)
    return view is None or (view.alive and not view.stopping)
