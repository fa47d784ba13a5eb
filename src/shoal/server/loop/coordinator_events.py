"""Events of the coordinators and workers of live jobs: readiness, generations, speeds, losses, the end."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from shoal.core.reason import Code
from shoal.core.reason import Reason as CoreReason
from shoal.core.words import counted
from shoal.executors.base import Exit
from shoal.server.api.models import JobState, Reason
from shoal.server.loop.lifecycle import Verb, may
from shoal.server.loop.live_job import ACTIVE, LEAVING, READY, LiveJob, LiveWorker
from shoal.server.loop.restarts import MAX_LOSSES, STEADY_S, Cause, step_done
from shoal.server.loop.runner import Parts, RunnerBase, RunnerLoop, describe_exit
from shoal.wire import events as ev
from shoal.wire.service import ControlService
from shoal.wire.state import CoordinatorState

#: Stragglers that are replaced per job. If several workers in turn are slow, their GPUs are not the cause.
MAX_REPLACED = 3
#: Notes per job that become events.
MAX_NOTES = 100
DONE = "done"
#: What follows the training in a script (a last evaluation, saving the model) is part of the job.
AFTER_DONE = "its training was done, then "
#: A job that has reached its target ends after so many steps even if its checkpoint could not be written.
UNSAVED_STEPS = 200


class CoordinatorEvents(RunnerBase):
    """Handles the wire's events of live jobs: one method per event type."""

    service: ControlService

    def __init__(self, loop: RunnerLoop, parts: Parts) -> None:
        super().__init__(loop, parts)
        self._pauses: dict[tuple[int, int], float] = {}
        #: When the pending reconfiguration of a job was requested.
        self._aimed_s: dict[int, float] = {}
        #: Where a script that has ended stopped, if it was before its last epoch.
        self._stopped: dict[int, str] = {}
        self._notes: dict[int, int] = {}
        #: When a worker became a member of its job.
        self._joined_s: dict[str, float] = {}
        #: How the coordinator noticed the loss of a worker whose process has not been seen to end yet.
        self._unexplained: dict[str, str] = {}

    def _leaving(self, worker: LiveWorker) -> None:
        worker.state = LEAVING
        self.parts.outbox.worker(worker.id, state=LEAVING)

    def _event(self, key: str, event: ev.JobEvent) -> None:
        job = self.parts.jobs.get(int(key))
        if job is None:
            return
        handler = getattr(self, f"_on_{type(event).__name__}", None)
        if handler is not None:
            handler(job, event)
            if not isinstance(event, ev.Measured):
                self.parts.outbox.job(job)
                self.loop.soon(job)

    def _on_WorkerReady(self, job: LiveJob, event: ev.WorkerReady) -> None:
        worker = job.workers.get(event.worker)
        if worker is not None and worker.state != LEAVING:
            worker.state = READY
            self.parts.outbox.worker(worker.id, state=READY)

    def _on_GenerationCommitted(self, job: LiveJob, event: ev.GenerationCommitted) -> None:
        before, job.size = job.size, len(event.members)
        now_s = self.loop.now_s()
        for rank, worker_id in enumerate(event.members):
            worker = job.workers.get(worker_id)
            if worker is not None:
                self._joined_s.setdefault(worker_id, now_s)
                if worker.state != ACTIVE:
                    self.parts.metrics.lost_gpu_s.labels(cause="start").inc(
                        max(now_s - worker.started_s, 0.0)
                    )
                worker.rank, worker.state = rank, ACTIVE
                self.parts.outbox.worker(worker_id, rank=rank, state=ACTIVE)
        job.generation = event.generation
        self.parts.profiles.learner(job).pace.begin(event.step)
        gpus = len(event.members)
        data: dict[str, Any] = {
            "gpus": gpus, "generation": event.generation, "step": event.step, "kind": str(event.kind),
        }  # fmt: skip
        if may(job.life, Verb.START) and job.again_s is None:
            # It was pending when its first new worker was added to an old one.
            self.advance(job, Verb.START, gpus=gpus)
        if may(job.life, Verb.RUN):
            self.advance(job, Verb.RUN, **data)
        else:
            job.resizes += event.kind == "switch"
            text = f"{before} -> {gpus} workers at step {event.step} (generation {event.generation})"
            self.parts.outbox.event("job.resized", text, job, **data)
            direction = "grow" if gpus > before else "shrink" if gpus < before else "replace"
            self.parts.metrics.resizes.labels(direction=direction, outcome="done").inc()
            if job.id in self._aimed_s:
                self.parts.metrics.resize.labels(phase="prepare").observe(now_s - self._aimed_s[job.id])
        self._aimed_s.pop(job.id, None)
        self.parts.profiles.tell_length(job)
        self.parts.sharing.process_began(job)

    def _on_PauseMeasured(self, job: LiveJob, event: ev.PauseMeasured) -> None:
        """All workers pause together, so the pause of the job is the longest of theirs."""
        known = self._pauses.get((job.id, event.generation), 0.0)
        if event.pause_s > known:
            self._pauses[job.id, event.generation] = event.pause_s
            job.stalled_s += event.pause_s - known
            self.parts.metrics.lost_gpu_s.labels(cause="resize").inc((event.pause_s - known) * job.gpus)
        if not known:
            self.parts.metrics.resize.labels(phase="pause").observe(event.pause_s)

    def _check_target(self, job: LiveJob, step: int, loss: float | None) -> None:
        """A job that has reached its target saves its state and ends, all workers at the same step."""
        target, handle = job.spec.get("target_loss"), self.service.jobs.get(str(job.id))
        if target is None or handle is None or job.ending is not None:
            return
        if job.reached_step is None and loss is not None and loss <= target:
            job.reached_step, job.reached_loss = step, loss
            text = f"its loss is {loss:.4g} at step {step}, so it has reached its target of {target:g}"
            self.parts.outbox.event(
                "job.reached", f"{text}; it saves its state and ends", job, loss=loss, step=step
            )
            self.parts.outbox.job(job)
            handle.ask_checkpoint()
        elif job.reached_step is not None and step >= job.reached_step + UNSAVED_STEPS:
            self._end_at_target(job)

    def _end_at_target(self, job: LiveJob) -> None:
        handle = self.service.jobs.get(str(job.id))
        if handle is not None and job.ending is None and job.workers:
            job.ending = DONE
            self.parts.outbox.job(job)
            handle.set_target([])

    def _on_Measured(self, job: LiveJob, event: ev.Measured) -> None:
        worker, report = job.workers.get(event.worker), event.report
        self._take_notes(job, event)
        if worker is None or worker.rank != 0 or worker.state != ACTIVE:
            return
        progress, learner = job.progress, self.parts.profiles.learner(job)
        progress.step = report.step
        step_done(job, report.step)
        progress.total_steps = report.total_steps or None
        progress.values |= {k: v for k, v in report.values.items() if math.isfinite(v)}
        learner.step, learner.total_steps = float(report.step), progress.total_steps
        if "loss" in report.values and report.steps:
            learner.observe_loss(report.step, report.values["loss"])
            self._check_target(job, report.step, learner.recent_loss())
        step_s = learner.pace.take(report)
        if step_s is not None:
            progress.speed = 1.0 / step_s
        if step_s is not None and not self.parts.sharing.facts.shares(job):
            nodes = {w.device[0] for w in job.workers.values() if w.state == ACTIVE}
            # The type of its target may be another one: until the switch it trains where it was.
            gpu_type = self.parts.nodes[worker.device[0]].gpu_type
            self.parts.profiles.measured(job, report.workers, len(nodes), step_s, gpu_type)
            self.parts.searches.measured(job, report.workers, step_s, report.batch_size)
        self.parts.profiles.tell_length(job)

    def _take_notes(self, job: LiveJob, event: ev.Measured) -> None:
        """What the runtime in the workers has to say to the job's owner."""
        for note in event.report.notes:
            taken = self._notes[job.id] = self._notes.get(job.id, 0) + 1
            if taken <= MAX_NOTES:
                self.parts.outbox.event("worker.note", note[:500], job, worker=event.worker)
                self.loop.soon(job)

    def _on_WorkerLost(self, job: LiveJob, event: ev.WorkerLost) -> None:
        self.parts.profiles.worker_failed(job)
        text = f"worker {event.worker} was lost: {event.why}"
        self.parts.outbox.event("worker.lost", text, job, worker=event.worker, was_member=event.was_member)
        self._count_loss(job, event.worker, event.why)

    def _on_WorkerRefused(self, job: LiveJob, event: ev.WorkerRefused) -> None:
        self.parts.profiles.worker_failed(job)
        text = f"worker {event.worker} could not join: {_last_line(event.why)}"
        self.parts.outbox.event("worker.lost", text, job, worker=event.worker, why=event.why[:4000])
        self._count_loss(job, event.worker, text)

    def _count_loss(self, job: LiveJob, worker_id: str, why: str, cause: Cause = Cause.LOST) -> None:
        """Let a job that goes on with fewer workers add new ones, or start it again if these fail again and again."""
        job.last_loss = why
        if worker_id in job.workers:
            self._unexplained[worker_id] = why
        joined_s = self._joined_s.pop(worker_id, math.inf)
        handle = self.service.jobs.get(str(job.id))
        if handle is None or not job.wanted or job.ending is not None:
            return
        left = [w for w in usable_workers(job, handle.state) if w.id != worker_id]
        steady = self.loop.now_s() - joined_s >= STEADY_S
        if not left or self.parts.restarts.worker_lost(job, steady=steady, left=len(left)):
            return  # without any worker it is stranded, which is another event
        text = f"{counted(job.vain_losses, 'worker')} were lost before it completed a step"
        if job.losses >= MAX_LOSSES:
            text = f"{counted(job.losses, 'worker')} in a row were lost soon after they started"
        self._restart_or_end(job, cause, f"{text}, the last so: {why}")

    def _explain_loss(self, job: LiveJob, exit_: Exit) -> None:
        """A process has ended: say how, if so far only its closed connection was known."""
        noticed = self._unexplained.pop(exit_.worker, None)
        killed_here = exit_.asked_to_end and exit_.signal == "SIGKILL"
        if noticed is None or killed_here or (exit_.signal is None and not exit_.code):
            return
        how = describe_exit(exit_)
        job.last_loss = job.last_loss.replace(noticed, how)
        job.ending = job.ending.replace(noticed, how) if job.ending is not None else None
        if job.life.message is not None:
            job.life = replace(job.life, message=job.life.message.replace(noticed, how))
        self.parts.outbox.job(job)

    def _restart_or_end(self, job: LiveJob, cause: Cause, why: str, begin: str = "") -> None:
        if self.start_again(job, cause, why + begin):
            return
        job.ending = why
        if job.workers:
            self.service.jobs[str(job.id)].stop(why)

    def _on_WorkerLeft(self, job: LiveJob, event: ev.WorkerLeft) -> None:
        self._joined_s.pop(event.worker, None)
        worker = job.workers.get(event.worker)
        if worker is not None:
            self._leaving(worker)

    def _on_StragglerFound(self, job: LiveJob, event: ev.StragglerFound) -> None:
        text = f"worker {event.worker} computes at {event.relative_speed:.0%} of the others' speed"
        reason = Reason.of(CoreReason(Code.STRAGGLER, text, {"relative_speed": event.relative_speed}))
        data = {"worker": event.worker, "reason": reason.model_dump()}
        self.parts.outbox.event("worker.straggler", text, job, **data)
        if job.spec.get("replace_stragglers", False):
            self._replace(job, event.worker, data)

    def _replace(self, job: LiveJob, slow: str, data: dict[str, Any]) -> None:
        """Replace a straggler by a new worker if a GPU is free, as in Resource Elasticity (MLSys'20)."""
        worker, handle = job.workers.get(slow), self.service.jobs.get(str(job.id))
        if worker is None or handle is None or worker.state != ACTIVE or slow not in handle.state.target:
            return
        free = self.choose(job, {worker.device[0]: 1}, [worker]) if job.replaced < MAX_REPLACED else None
        if free is None:
            why = "no other GPU is free" if job.replaced < MAX_REPLACED else "others were replaced already"
            self.parts.outbox.event("worker.kept", f"worker {slow} stays, though slow: {why}", job, **data)
            return
        new = self.new_worker(job, free[0], None)
        self.parts.ceilings.take_places(job, [new], [worker])
        job.replaced, worker.is_replaced = job.replaced + 1, True
        text = f"worker {slow} is replaced by {new.id}: {data['reason']['sentence']}"
        self.parts.outbox.event("worker.replaced", text, job, **data, by=new.id)
        handle.set_target([new.id if w == slow else w for w in handle.state.target])

    def _on_Checkpointed(self, job: LiveJob, event: ev.Checkpointed) -> None:
        job.checkpoint_s = self.loop.now_s()
        self.parts.outbox.event("job.checkpoint", f"saved at step {event.step}", job, step=event.step)
        if job.reached_step is not None and event.step >= job.reached_step:
            self._end_at_target(job)

    def _on_JobPaused(self, job: LiveJob, event: ev.JobPaused) -> None:
        job.checkpoint_s = self.loop.now_s()
        self.parts.outbox.event(
            "job.checkpoint", f"saved at step {event.step} and left", job, step=event.step
        )

    def _on_JobStranded(self, job: LiveJob, event: ev.JobStranded) -> None:
        if job.ending is not None or job.life.state in (JobState.STOPPING, JobState.PAUSED):
            return
        if job.again_s is not None:
            return  # it rests already, and its last workers were lost while they saved its state
        cause = Cause.UNBEGUN if job.is_unbegun else Cause.LOST
        why = f"all its workers were lost, the last so: {job.last_loss or event.why}"
        begin = "its last checkpoint" if event.checkpoint else "the beginning"
        # Newcomers that are left have nothing to continue from.
        self._restart_or_end(job, cause, why, f"; it goes on from {begin}")

    def _on_JobFinished(self, job: LiveJob, event: ev.JobFinished) -> None:
        job.ending = DONE
        if event.stopped:
            self._stopped[job.id] = event.stopped[:500]
        job.progress.step = event.step

    def _on_JobFailed(self, job: LiveJob, event: ev.JobFailed) -> None:
        if job.life.state is JobState.STOPPING or job.ending not in (None, DONE):
            return
        self.parts.profiles.worker_failed(job)
        after = AFTER_DONE if job.ending == DONE else ""
        job.ending = f"{after}worker {event.worker} failed: {_last_line(event.why)}"
        self.parts.outbox.event("worker.lost", job.ending, job, worker=event.worker, why=event.why[-4000:])


def usable_workers(job: LiveJob, coordinator: CoordinatorState) -> list[LiveWorker]:
    """The workers that the job has or is about to have: not those that leave, are replaced, or have ended."""
    return [
        w
        for w in job.workers.values()
        if w.state != LEAVING and not w.is_replaced and _lives(coordinator, w.id)
    ]


def _lives(coordinator: CoordinatorState, worker_id: str) -> bool:
    view = coordinator.workers.get(worker_id)
    return view is None or (view.alive and not view.stopping)


def _last_line(text: str) -> str:
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return lines[-1].strip()[:500] if lines else "it did not say why"
