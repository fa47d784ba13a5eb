"""Crews of live jobs: resized while they train, through the wire's coordinator.

What is decided here is only which workers a job shall have and on which GPUs. How it gets from one set to the
next is the coordinator's affair; a GPU is free when the process on it has ended.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from typing import TYPE_CHECKING, Any

from shoal.core.reason import Code
from shoal.core.reason import Reason as CoreReason
from shoal.executors.base import Exit
from shoal.server.crew import CrewBase, describe_exit, wanted
from shoal.server.lifecycle import Verb, may
from shoal.server.live_job import ACTIVE, LEAVING, MAX_REFUSED, READY, LiveJob, LiveWorker
from shoal.server.models import JobState, Reason
from shoal.wire import events as ev
from shoal.wire.auth import new_secret, read_secret, write_secret
from shoal.wire.service import ControlService, JobHandle

if TYPE_CHECKING:
    from shoal.server.conductor import Conductor

log = logging.getLogger("shoal.server")

#: Where several workers are slow one after the other, their GPUs are not the cause.
MAX_REPLACED = 3
LOST_RESTARTS = 3
"""How often a job that lost all its workers goes on from its last checkpoint, unless its owner says."""
DONE = "done"
NO_RUNTIME = (
    "its command ended without ever joining the job: a job with a range of GPUs must use shoal.torch; "
    "for any other command say resize `restart`, or give a fixed number of GPUs"
)


class Elastic(CrewBase):
    """Also the executor of the wire's service: it turns the coordinators' wishes into workers."""

    def __init__(self, conductor: Conductor, host: str = "127.0.0.1") -> None:
        super().__init__(conductor)
        self._host = host
        self.service = ControlService(self._Adapter(self), on_event=self._event)
        self._pauses: dict[tuple[int, int], float] = {}
        #: When the pending reconfiguration of a job was asked for.
        self._aimed_s: dict[int, float] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    class _Adapter:
        """What the service sees of us."""

        def __init__(self, crew: Elastic) -> None:
            self.crew = crew

        def start(self, job: str, worker: str) -> None:
            self.crew._wanted_start(job, worker)

        def stop(self, job: str, worker: str, kill: bool) -> None:
            self.crew._wanted_stop(job, worker, kill)

    async def open(self) -> None:
        """Listen where the last server did, so that its workers find us, and take their jobs over."""
        port = int(self.c.store.get("control_port", 0))
        for job in self.c.jobs.values():
            if job.coordinator is not None and self.c.crews[job.resize] is self:
                self._handle(job)
        try:
            address = await self.service.start(self._host, port)
        except OSError as error:
            self.c.warnings.append(f"port {port} of the control channel is taken ({error.strerror})")
            address = await self.service.start(self._host, 0)
        with self.c.store.change(self.c.now_s()) as change:
            change.put("control_port", int(address.rpartition(":")[2]))

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await self.service.close()

    def _handle(self, job: LiveJob) -> JobHandle:
        key = str(job.id)
        if key not in self.service.jobs:
            directory = self.c.home.job(job.id)
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
        self.c.outbox.job(job)
        self.c.outbox.flush()

    # -- towards the target ------------------------------------------------------------------------

    def reconcile(self, job: LiveJob) -> None:
        want = wanted(job)
        self.c.unmet.discard(job.id)
        if job.ending is not None or job.life.state is JobState.STOPPING:
            return
        try:
            handle = self._handle(job)
        except OSError as error:
            self.over(job, Verb.FAIL, f"cannot prepare its directory: {error.strerror}")
            return
        if want:
            self._aim(job, handle, want)
        elif job.workers and not handle.coordinator.pausing:
            handle.set_target([])
        elif not job.workers and may(job.life, Verb.PREEMPT):
            self.advance(job, Verb.PREEMPT)

    def _aim(self, job: LiveJob, handle: JobHandle, want: dict[int, int]) -> None:
        """Name the workers it shall have: those it has where they are wanted, and new ones on free GPUs."""
        coordinator = handle.coordinator
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
            devices = self.c.devices.choose(need)
            if devices is None:
                # All or nothing: a second switch a moment later would cost more than the wait.
                self.c.unmet.add(job.id)
                return
            if not job.workers and may(job.life, Verb.START):
                self.advance(job, Verb.START, gpus=len(devices))
            new = [self.new_worker(job, device, None) for device in devices]
        kept = {w.id for w in keep}
        # The wished order is the rank order the job has already.
        target = [w.id for w in usable if w.id in kept] + [w.id for w in new]
        if target and (tuple(target) != coordinator.target or coordinator.pausing):
            if coordinator.pending is not None:
                self.c.metrics.superseded.add()
            try:
                handle.set_target(target)
                self._aimed_s[job.id] = self.c.now_s()
            except ValueError as error:  # one of them ended this moment; its exit brings us back here
                log.info("job %s: %s", job.id, error)

    def _wanted_start(self, key: str, worker_id: str) -> None:
        job = self.c.jobs.get(int(key))
        worker = job.workers.get(worker_id) if job is not None else None
        if job is None or worker is None:
            return
        directory = self.c.home.job(job.id)
        env = {
            "SHOAL_CONTROL": self.service.address,
            "SHOAL_SECRET_FILE": str(directory / "secret"),
            "SHOAL_CHECKPOINT": str(directory / "checkpoint.pt"),
        }
        self.start(job, worker, env, warm=True)

    def _wanted_stop(self, key: str, worker_id: str, kill: bool) -> None:
        job = self.c.jobs.get(int(key))
        worker = job.workers.get(worker_id) if job is not None else None
        if job is None or worker is None:
            return
        view = self.service.jobs[key].coordinator.workers.get(worker_id)
        if kill or view is None or not view.connected:
            self.stop(job, worker, kill=kill)
        else:
            # It was asked over the wire; signals are for one that does not listen.
            self._leaving(worker)
            asyncio.get_running_loop().call_later(job.spec["grace_s"], self._insist, worker_id)
        self.c.soon(job)

    def _leaving(self, worker: LiveWorker) -> None:
        worker.state = LEAVING
        self.c.outbox.worker(worker.id, state=LEAVING)

    def _insist(self, worker_id: str) -> None:
        self.c.executor.stop(worker_id)

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

    # -- what workers and coordinators tell --------------------------------------------------------

    def exited(self, job: LiveJob, worker: LiveWorker, exit_: Exit) -> None:
        job.exit_code, job.signal = exit_.code, exit_.signal
        handle = self.service.jobs.get(str(job.id))
        if job.ending is None and handle is not None and _finished_unheard(handle, worker, exit_):
            job.ending = DONE  # on record together with the end of this worker
            self.c.outbox.job(job)
        task = asyncio.get_running_loop().create_task(self._exited(job, worker, exit_, self.c.then_s(job)))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _exited(self, job: LiveJob, worker: LiveWorker, exit_: Exit, then_s: float) -> None:
        handle = self.service.jobs.get(str(job.id))
        if handle is not None:
            view = handle.coordinator.workers.get(worker.id)
            if view is not None and not exit_.began:
                view.stopping = (
                    True  # it was lost with a server, before it was started: not the script's fault
                )
            await handle._exited(worker.id, describe_exit(exit_))
        if not job.is_over:
            with self.c.as_of(then_s):
                self._after_exit(job, worker, handle, exit_)
        self.c.soon(job)

    def _after_exit(self, job: LiveJob, worker: LiveWorker, handle: JobHandle | None, exit_: Exit) -> None:
        of_itself = exit_.began and not exit_.told and worker.state != LEAVING
        newborn = job.generation == 0 and job.ending is None and of_itself
        if newborn and job.life.state is not JobState.STOPPING and not (exit_.ok and job.workers):
            job.ending = NO_RUNTIME if exit_.ok else describe_exit(exit_)
            self.c.outbox.job(job)
            if handle is not None:
                handle.stop(job.ending)
        if not job.workers:
            self._none_left(job)

    def conclude_rest(self, job: LiveJob) -> None:
        self._none_left(job)

    def _none_left(self, job: LiveJob) -> None:
        if job.ending == DONE:
            self.over(job, Verb.SUCCEED)
        elif job.life.state is JobState.STOPPING:
            self.over(job, Verb.VANISH)
        elif job.ending == NO_RUNTIME:
            self.over(job, Verb.FAIL, NO_RUNTIME)
        elif job.ending is not None:
            self._forget_coordinator(job)
            self.conclude(job)
        elif not wanted(job) and may(job.life, Verb.PREEMPT):
            self.advance(job, Verb.PREEMPT)

    def _forget_coordinator(self, job: LiveJob) -> None:
        """A coordinator whose job has failed is of no more use; the next begins from its checkpoint."""
        if str(job.id) not in self.service.jobs:
            return
        before = self.service.jobs[str(job.id)].coordinator
        self.service.remove(str(job.id))
        job.coordinator, job.generation = None, 0
        if job.life.restarts < job.spec["max_restarts"]:
            after = self._handle(job).coordinator
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
        """By node: how long ago its most silent worker was heard."""
        ages: dict[str, float] = {}
        for key, handle in self.service.jobs.items():
            job = self.c.jobs.get(int(key))
            for view in handle.coordinator.workers.values():
                worker = job.workers.get(view.worker) if job is not None else None
                if worker is not None and view.connected:
                    age_s = max(time.monotonic() - view.heard_s, 0.0)
                    ages[worker.node] = max(ages.get(worker.node, 0.0), age_s)
        return ages

    def _event(self, key: str, event: ev.JobEvent) -> None:
        job = self.c.jobs.get(int(key))
        if job is None:
            return
        handler = getattr(self, f"_on_{type(event).__name__}", None)
        if handler is not None:
            handler(job, event)
            if not isinstance(event, ev.Measured):
                self.c.outbox.job(job)
                self.c.soon(job)

    def _on_WorkerReady(self, job: LiveJob, event: ev.WorkerReady) -> None:
        worker = job.workers.get(event.worker)
        if worker is not None and worker.state != LEAVING:
            worker.state = READY
            self.c.outbox.worker(worker.id, state=READY)

    def _on_GenerationCommitted(self, job: LiveJob, event: ev.GenerationCommitted) -> None:
        before, job.size = job.size, len(event.members)
        now_s = self.c.now_s()
        for rank, worker_id in enumerate(event.members):
            worker = job.workers.get(worker_id)
            if worker is not None:
                if worker.state != ACTIVE:
                    self.c.metrics.lost_gpu_s.add(max(now_s - worker.started_s, 0.0), cause="start")
                worker.rank, worker.state = rank, ACTIVE
                self.c.outbox.worker(worker_id, rank=rank, state=ACTIVE)
        job.generation, job.refused = event.generation, 0
        self.c.profiles.learner(job).pace.begin(event.step)
        gpus = len(event.members)
        data = {"gpus": gpus, "generation": event.generation, "step": event.step, "kind": str(event.kind)}
        if may(job.life, Verb.RUN):
            self.advance(job, Verb.RUN, **data)
        else:
            job.resizes += event.kind == "switch"
            text = f"{before} -> {gpus} workers at step {event.step} (generation {event.generation})"
            self.c.outbox.event("job.resized", text, job, **data)
            direction = "grow" if gpus > before else "shrink" if gpus < before else "replace"
            self.c.metrics.resizes.add(direction=direction, outcome="done")
            if job.id in self._aimed_s:
                self.c.metrics.resize.observe(now_s - self._aimed_s[job.id], phase="prepare")
        self._aimed_s.pop(job.id, None)
        self.c.profiles.tell_length(job)

    def _on_PauseMeasured(self, job: LiveJob, event: ev.PauseMeasured) -> None:
        """All workers stand still together: the longest pause is the job's."""
        known = self._pauses.get((job.id, event.generation), 0.0)
        if event.pause_s > known:
            self._pauses[job.id, event.generation] = event.pause_s
            job.stalled_s += event.pause_s - known
            self.c.metrics.lost_gpu_s.add((event.pause_s - known) * job.gpus, cause="resize")
        if not known:
            self.c.metrics.resize.observe(event.pause_s, phase="pause")

    def _on_Measured(self, job: LiveJob, event: ev.Measured) -> None:
        worker, report = job.workers.get(event.worker), event.report
        if worker is None or worker.rank != 0 or worker.state != ACTIVE:
            return
        progress, learner = job.progress, self.c.profiles.learner(job)
        progress.step = report.step
        progress.total_steps = report.total_steps or None
        progress.values |= {k: v for k, v in report.values.items() if math.isfinite(v)}
        learner.step, learner.total_steps = float(report.step), progress.total_steps
        if "loss" in report.values and report.steps:
            learner.convergence.observe(report.step, report.values["loss"])
        step_s = learner.pace.take(report)
        if step_s is not None:
            progress.speed = 1.0 / step_s
            nodes = len({w.device[0] for w in job.workers.values() if w.state == ACTIVE})
            self.c.profiles.measured(job, report.workers, nodes, step_s)
        self.c.profiles.tell_length(job)

    def _on_WorkerLost(self, job: LiveJob, event: ev.WorkerLost) -> None:
        job.refused += not event.was_member
        text = f"worker {event.worker} was lost: {event.why}"
        self.c.outbox.event("worker.lost", text, job, worker=event.worker, was_member=event.was_member)

    def _on_WorkerRefused(self, job: LiveJob, event: ev.WorkerRefused) -> None:
        job.refused += 1
        text = f"worker {event.worker} could not join: {_last_line(event.why)}"
        self.c.outbox.event("worker.lost", text, job, worker=event.worker, why=event.why[:4000])
        if job.refused >= MAX_REFUSED:
            self.c.outbox.event(
                "worker.lost", f"{job.refused} newcomers failed in a row; no more are tried for now", job
            )

    def _on_WorkerLeft(self, job: LiveJob, event: ev.WorkerLeft) -> None:
        worker = job.workers.get(event.worker)
        if worker is not None:
            self._leaving(worker)

    def _on_StragglerFound(self, job: LiveJob, event: ev.StragglerFound) -> None:
        text = f"worker {event.worker} computes at {event.relative_speed:.0%} of the others' speed"
        reason = Reason.of(CoreReason(Code.STRAGGLER, text, {"relative_speed": event.relative_speed}))
        data = {"worker": event.worker, "reason": reason.model_dump()}
        self.c.outbox.event("worker.straggler", text, job, **data)
        if job.spec.get("replace_stragglers", False):
            self._replace(job, event.worker, data)

    def _replace(self, job: LiveJob, slow: str, data: dict[str, Any]) -> None:
        """Or, Zhang and Freedman (MLSys'20): a straggler's place is given to a new worker, if a GPU is free."""
        worker, handle = job.workers.get(slow), self.service.jobs.get(str(job.id))
        if (
            worker is None
            or handle is None
            or worker.state != ACTIVE
            or slow not in handle.coordinator.target
        ):
            return
        free = self.c.devices.choose({worker.device[0]: 1}) if job.replaced < MAX_REPLACED else None
        if free is None:
            why = "no other GPU is free" if job.replaced < MAX_REPLACED else "others were replaced already"
            self.c.outbox.event("worker.kept", f"worker {slow} stays, though slow: {why}", job, **data)
            return
        new = self.new_worker(job, free[0], None)
        job.replaced, worker.is_replaced = job.replaced + 1, True
        text = f"worker {slow} is replaced by {new.id}: {data['reason']['sentence']}"
        self.c.outbox.event("worker.replaced", text, job, **data, by=new.id)
        handle.set_target([new.id if w == slow else w for w in handle.coordinator.target])

    def _on_Checkpointed(self, job: LiveJob, event: ev.Checkpointed) -> None:
        job.checkpoint_s = self.c.now_s()
        self.c.outbox.event("job.checkpoint", f"saved at step {event.step}", job, step=event.step)

    def _on_JobPaused(self, job: LiveJob, event: ev.JobPaused) -> None:
        job.checkpoint_s = self.c.now_s()
        self.c.outbox.event("job.checkpoint", f"saved at step {event.step} and left", job, step=event.step)

    def _on_JobStranded(self, job: LiveJob, event: ev.JobStranded) -> None:
        if job.ending is not None or job.life.state in (JobState.STOPPING, JobState.PAUSED):
            return
        limit = job.spec["max_restarts"] if "max_restarts" in job.given else LOST_RESTARTS
        if job.life.restarts < limit and may(job.life, Verb.RESTART):
            begin = "its last checkpoint" if event.checkpoint else "the beginning"
            self.advance(job, Verb.RESTART, f"all its workers were lost; it goes on from {begin}")
        else:
            job.ending = f"all its workers were lost: {event.why}"

    def _on_JobFinished(self, job: LiveJob, event: ev.JobFinished) -> None:
        job.ending = DONE
        job.progress.step = event.step

    def _on_JobFailed(self, job: LiveJob, event: ev.JobFailed) -> None:
        if job.life.state is JobState.STOPPING or job.ending is not None:
            return
        job.ending = f"worker {event.worker} failed: {_last_line(event.why)}"
        self.c.outbox.event("worker.lost", job.ending, job, worker=event.worker, why=event.why[-4000:])


def _finished_unheard(handle: JobHandle, worker: LiveWorker, exit_: Exit) -> bool:
    """Whether its script came to its end while no server was there to be told so.

    It had joined the job, ended by itself and well, and this server has not heard a word from it.
    """
    view = handle.coordinator.workers.get(worker.id)
    unheard = view is not None and view.met and view.status.seq == 0
    return unheard and exit_.ok and not exit_.told and worker.state != LEAVING


def _lives(coordinator: Any, worker_id: str) -> bool:
    view = coordinator.workers.get(worker_id)
    return view is None or (view.alive and not view.stopping)


def _last_line(text: str) -> str:
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return lines[-1].strip()[:500] if lines else "it did not say why"
