"""The runner of live jobs, which are resized while they train, through the wire's coordinator.

The runner decides which workers a job has and on which GPUs. The coordinator moves the job from one set of workers to
the next. A GPU is free when the process on it has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from shoal.agents.certificate import new_certificate
from shoal.executors.accounts import address_file
from shoal.executors.base import Exit, NamedAccount, OwnAccount
from shoal.server.api.models import JobState, Resize
from shoal.server.loop.control_port import ControlPort
from shoal.server.loop.coordinator_events import AFTER_DONE, DONE, CoordinatorEvents, usable_workers
from shoal.server.loop.job_keys import JobKeys
from shoal.server.loop.lifecycle import Verb, may
from shoal.server.loop.live_job import ACTIVE, LEAVING, LiveJob, LiveWorker
from shoal.server.loop.restarts import Cause, may_restart
from shoal.server.loop.runner import Parts, RunnerLoop, describe_exit
from shoal.wire.job_files import own
from shoal.wire.messages import Phase
from shoal.wire.service import ControlService, JobHandle
from shoal.wire.state import CoordinatorState

log = logging.getLogger("shoal.server")

LEFT_S = 1.0
"""How long a worker that has left the job may take to end by itself."""
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
        self._port = ControlPort(self.service, parts.store, parts.warnings)
        self._keys = JobKeys(parts.warnings)
        self._tasks: set[asyncio.Task[object]] = set()

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
        # The imports of the first certificate take long. They must not delay the first job.
        self._keep(asyncio.to_thread(new_certificate, "none"))
        for job in self.parts.jobs.values():
            if job.coordinator is not None and job.resize is Resize.LIVE:
                try:
                    self._handle(job)
                except OSError as error:
                    self.end(job, f"cannot prepare its directory: {error.strerror}")
                    continue
                self._joined_s |= {w.id: w.started_s for w in job.workers.values() if w.state == ACTIVE}
        if not self.parts.store.get("control_port", 0):
            with contextlib.suppress(OSError):  # of an earlier home in this place
                address_file(self.parts.home.path).unlink()
        await self._port.open(self._host, self.parts.jobs, self._address_file, self.loop.now_s())
        self.parts.addresses.here = self.service.address
        self._report_recorded_exits()

    def _report_recorded_exits(self) -> None:
        """Tell the coordinators of workers whose end is on record but was not in the coordinator's saved state."""
        for job in self.parts.jobs.values():
            handle = self.service.jobs.get(str(job.id))
            for view in [] if handle is None else list(handle.state.workers.values()):
                if handle is not None and view.met and view.alive and view.worker not in job.workers:
                    handle.exited(view.worker, "it ended before the server was restarted")

    def await_machines(self, *, can_connect: bool) -> None:
        """Other machines cannot connect, or can again: so long, their workers are not given up before their lease."""
        for job in self.parts.jobs.values():
            handle = self.service.jobs.get(str(job.id))
            if handle is not None:
                nodes = {w.id: w.device[0] for w in job.workers.values()}  # -1: it is not known yet
                remote = [w for w, node in nodes.items() if node < 0 or self.parts.nodes[node].remote]
                handle.await_return(remote, can_connect=can_connect)

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await self.service.close()

    def _handle(self, job: LiveJob) -> JobHandle:
        key = str(job.id)
        if key not in self.service.jobs:
            directory = self.parts.home.job(job.id)
            handle = self.service.add(
                key,
                self._keys.secret(job.id, directory),
                restore=job.coordinator,
                on_change=lambda state: self._record(job, state),
                files=self._state(job),
                opens_paths=lambda: self._reads_all(job),
                was_started=lambda worker: worker in job.workers,
            )
            name_files(handle.state, directory)
        return self.service.jobs[key]

    def _state(self, job: LiveJob) -> Path:
        """The directory of its state. It is on record, where the job cannot change it."""
        home = self.parts.home
        if job.state_directory is None:
            found = home.new_state(job.id) if job.coordinator is None else home.linked_state(job.id)
            job.state_directory = str(found or "")
            self.parts.outbox.job(job)
        return Path(job.state_directory) if job.state_directory else home.job(job.id)

    def _reads_all(self, job: LiveJob) -> bool:
        """Whether its workers run under the server's account, with nothing hidden from them."""
        account = self.parts.account_of(job.user)
        return isinstance(account, OwnAccount) and not account.shared

    def _address_file(self, job: LiveJob) -> Path:
        """Where its workers on this machine find the control plane's address, if it had to change it."""
        if os.geteuid() == 0 and isinstance(self.parts.account_of(job.user), NamedAccount):
            # Under an account of its own it cannot enter the server's home.
            return address_file(self.parts.home.path)
        return self._state(job) / "control"

    def _record(self, job: LiveJob, state: dict[str, Any]) -> bool:
        """Write the coordinator's state before its orders are sent. False if the disk is full."""
        job.coordinator = state
        self.parts.outbox.job(job)
        return self.parts.outbox.flush()

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
        if self._port.has_earlier(job):
            self._renew(job, handle)
        elif want:
            name_files(handle.state, self.parts.home.job(job.id))
            self._set_workers(job, handle, want)
        elif job.workers and not handle.state.pausing:
            self._aim(job, handle, [])
        elif not job.workers and may(job.life, Verb.PREEMPT):
            self.advance(job, Verb.PREEMPT)

    def _renew(self, job: LiveJob, handle: JobHandle) -> None:
        """Let workers of an earlier version save their state and leave."""
        if self._port.speaks_previous:  # they know files by path only
            handle.state.pause_path = str(self.parts.home.job(job.id) / "paused.pt")
        if not handle.state.pausing:
            text = "an earlier version started its workers: they save their state, and new ones go on from it"
            self.parts.outbox.event("job.renewed", text, job)
            handle.set_target([])

    def _set_workers(self, job: LiveJob, handle: JobHandle, want: dict[int, int]) -> None:
        """Set the job's workers: keep those whose node still counts in the target, and add new ones on free GPUs."""
        coordinator = handle.state
        usable = usable_workers(job, coordinator)
        need, keep = dict(want), []
        for worker in sorted(usable, key=lambda w: w.state != ACTIVE):
            if need.get(worker.device[0], 0) > 0:
                need[worker.device[0]] -= 1
                keep.append(worker)
        need = {node: count for node, count in need.items() if count}
        new: list[LiveWorker] = []
        if need and job.grows_s is None:
            leavers = [w for w in usable if w not in keep]
            devices = self.choose(job, need, leavers)
            if devices is None:
                # All or nothing: a second switch a moment later would cost more than the wait.
                self.parts.unmet.add(job.id)
                return
            if not job.workers:
                job.began_s = self.loop.now_s()
            if may(job.life, Verb.START):
                self.advance(job, Verb.START, gpus=len(devices))
            new = [self.new_worker(job, device, None) for device in devices]
            self.parts.ceilings.take_places(job, new, leavers)
        kept = {w.id for w in keep}
        # Workers that stay keep their rank order. New workers come last.
        target = [w.id for w in usable if w.id in kept] + [w.id for w in new]
        if target and (tuple(target) != coordinator.target or coordinator.pausing):
            try:
                self._aim(job, handle, target)
            except ValueError as error:  # one of them has just ended; its exit reconciles the job again
                log.info("job %s: %s", job.id, error)

    def _aim(self, job: LiveJob, handle: JobHandle, target: list[str]) -> None:
        """Set the target, and count one that it replaces while new workers prepare."""
        coordinator = handle.state
        is_replaced = coordinator.pending is not None or job.id in self._aimed_s
        handle.set_target(target)
        self.parts.metrics.superseded.inc(is_replaced)
        self._aimed_s.pop(job.id, None)
        members = () if coordinator.active is None else coordinator.active.members
        if target and (coordinator.pending is not None or tuple(target) != members):
            self._aimed_s[job.id] = self.loop.now_s()  # a generation follows, which ends the preparation

    def _start_requested(self, key: str, worker_id: str) -> None:
        job = self.parts.jobs.get(int(key))
        worker = job.workers.get(worker_id) if job is not None else None
        if job is None or worker is None:
            return
        directory = self.parts.home.job(job.id)
        node, addresses = self.parts.nodes[worker.device[0]], self.parts.addresses
        env = addresses.env(node) | {"SHOAL_CHECKPOINT": own("checkpoint.pt")}
        env["SHOAL_GPUS"] = str(job.range)
        if not node.remote:
            env["SHOAL_CONTROL_FILE"] = str(self._address_file(job))
        if isinstance(self.parts.account_of(job.user), OwnAccount):
            # Under an account of its own it cannot enter the server's home: its files go through the control plane.
            state = self._state(job)
            env |= addresses.state_env(node, state, proved=state.parent == self.parts.home.states)
        files = {"SHOAL_SECRET_FILE": self._keys.text(job.id, directory)}
        self.start(job, worker, env, warm=True, secret_files=files)

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
            # One that has left the job has given everything away: its GPU must not wait for its last lines.
            left = view.status.phase is Phase.LEFT
            wait_s = min(LEFT_S, job.spec["grace_s"]) if left else job.spec["grace_s"]
            asyncio.get_running_loop().call_later(wait_s, self._stop_after, worker_id, left)
        self.loop.soon(job)

    def _stop_after(self, worker_id: str, kill: bool) -> None:
        self.parts.executor.stop(worker_id, kill=kill)

    def cancel(self, job: LiveJob) -> None:
        for worker in job.workers.values():
            self.stop(job, worker)
        handle = self.service.jobs.get(str(job.id))
        if handle is not None:
            handle.stop("cancelled")
        if not job.workers:
            self.over(job, Verb.VANISH)

    def end(self, job: LiveJob, why: str) -> None:
        super().end(job, why)
        handle = self.service.jobs.get(str(job.id))
        if handle is not None:
            handle.stop(why)

    def shut_down(self, job: LiveJob) -> None:
        handle = self.service.jobs.get(str(job.id))
        if handle is None:  # its directory could not be prepared: nothing can be saved
            for worker in job.workers.values():
                self.stop(job, worker)
        elif self._port.has_earlier(job):
            self._renew(job, handle)
        elif job.workers:
            handle.set_target([])
        if may(job.life, Verb.PREEMPT):
            self.advance(job, Verb.PREEMPT, "the server was shut down; it goes on from where it was")

    def ask_checkpoint(self, job: LiveJob) -> None:
        handle = self.service.jobs.get(str(job.id))
        if handle is not None:
            handle.ask_checkpoint()

    # -- exits -------------------------------------------------------------------------------------

    def exited(self, job: LiveJob, worker: LiveWorker, exit_: Exit) -> None:
        job.exit_code, job.signal = exit_.code, exit_.signal
        job.is_unbegun = not exit_.began and not exit_.asked_to_end
        self._explain_loss(job, exit_)
        if job.is_unbegun:
            self._count_loss(job, worker.id, describe_exit(exit_), Cause.UNBEGUN)
        handle = self.service.jobs.get(str(job.id))
        if job.ending is None and handle is not None and _finished_unheard(handle, worker, exit_):
            job.ending = DONE  # written in the same transaction as the end of this worker
            self.parts.outbox.job(job)
        self._fail_after_done(job, worker, exit_)  # before the exit of another worker ends the job
        self._keep(self._exited(job, worker, exit_, self.loop.then_s(job)))

    def _keep(self, work: Coroutine[Any, Any, object]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _exited(self, job: LiveJob, worker: LiveWorker, exit_: Exit, then_s: float) -> None:
        handle = self.service.jobs.get(str(job.id))
        if handle is not None:
            view = handle.state.workers.get(worker.id)
            if view is not None and not exit_.began:
                # It was not started: a disk was full, or the last server or the keeper was killed before.
                view.stopping = True
            await handle.take_in_exit(worker.id, describe_exit(exit_), by_itself=exit_.code is not None)
        if not job.is_over:
            with self.loop.as_of(then_s):
                self._after_exit(job, worker, handle, exit_)
        self.loop.soon(job)

    def _after_exit(self, job: LiveJob, worker: LiveWorker, handle: JobHandle | None, exit_: Exit) -> None:
        # A worker that was killed, or whose keeper was, is a lost worker: the script did not fail.
        view = None if handle is None else handle.state.workers.get(worker.id)
        told = exit_.asked_to_end or worker.state == LEAVING or (view is not None and view.stopping)
        by_itself = exit_.began and exit_.code is not None and not told
        newborn = job.generation == 0 and job.ending is None and by_itself
        if newborn and job.life.state is not JobState.STOPPING and not (exit_.ok and job.workers):
            job.ending = NO_RUNTIME if exit_.ok else describe_exit(exit_)
            self.parts.outbox.job(job)
            if handle is not None:
                handle.stop(job.ending)
        self._fail_after_done(job, worker, exit_)
        if not job.workers:
            self._all_workers_ended(job)

    def _fail_after_done(self, job: LiveJob, worker: LiveWorker, exit_: Exit) -> None:
        by_itself = not (exit_.asked_to_end or exit_.node_lost or worker.state == LEAVING)
        if job.ending == DONE and exit_.code and by_itself:
            job.ending = AFTER_DONE + describe_exit(exit_)
            self.parts.outbox.job(job)

    def conclude_rest(self, job: LiveJob) -> None:
        self._all_workers_ended(job)

    def _all_workers_ended(self, job: LiveJob) -> None:
        if job.ending == DONE:
            self.over(job, Verb.SUCCEED, _at_target(job) or self._stopped.pop(job.id, None))
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
        if may_restart(job, Cause.FAILED):
            after = self._handle(job).state
            after.checkpoint, after.checkpoint_step = before.checkpoint, before.checkpoint_step

    def over(self, job: LiveJob, verb: Verb, message: str | None = None) -> None:
        job.coordinator = None
        super().over(job, verb, message)
        self._aimed_s.pop(job.id, None)
        self._keys.forget(job.id)
        self._notes.pop(job.id, None)
        for key in [k for k in self._pauses if k[0] == job.id]:
            del self._pauses[key]
        for kept in (self._joined_s, self._unexplained):
            for worker_id in [w for w in kept if w.startswith(f"{job.id}.")]:
                del kept[worker_id]
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


def _at_target(job: LiveJob) -> str | None:
    """Why a job that reached its target has ended; None for others."""
    if job.reached_step is None:
        return None
    return f"its loss reached {job.reached_loss:.4g} at step {job.reached_step} (target {job.spec['target_loss']:g})"


def name_files(state: CoordinatorState, directory: Path) -> None:
    """Refer to the job's own files by name. Earlier versions saved their paths, which other machines do not have."""
    state.pause_path = own("paused.pt")
    for field in ("paused", "checkpoint"):
        location = getattr(state, field)
        if location is not None and Path(location).parent == directory:
            setattr(state, field, own(Path(location).name))


def _finished_unheard(handle: JobHandle, worker: LiveWorker, exit_: Exit) -> bool:
    """Whether the worker's script finished while no server was running.

    This is so if it ended by itself with exit code 0, without a word since it connected last, as a member of the active
    generation or of a committed plan, which it may have carried out meanwhile. A worker that left by a plan (a pause,
    for example) ends with exit code 0 too, so one that a committed plan lets go has not finished: at worst, what it did
    since is done again.
    """
    state = handle.state
    view = state.workers.get(worker.id)
    if view is None or not view.met or view.status.seq or view.status.phase is Phase.LEFT:
        return False
    pending = state.pending
    if pending is not None and worker.id not in pending.plan.members:
        return False
    is_member = state.active is not None and worker.id in state.active.members
    if not is_member and (pending is None or not pending.committed):
        return False
    return exit_.ok and not exit_.asked_to_end and worker.state != LEAVING
