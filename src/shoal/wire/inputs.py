"""What a worker's messages change in the coordinator's state."""

from __future__ import annotations

from msgspec.structs import replace

from shoal.wire import events as ev
from shoal.wire.ending import end_job, fail_after_end
from shoal.wire.events import Effect, Emit, StopWorker
from shoal.wire.losses import remove
from shoal.wire.messages import Phase, Report, Status
from shoal.wire.signature import first_difference
from shoal.wire.state import CoordinatorState, Generation, WorkerView


def take_status(state: CoordinatorState, view: WorkerView, status: Status, now_s: float) -> list[Effect]:
    """Take in a status that is newer than the last one."""
    before, view.status = view.status, status
    if status.signature is None:
        view.status = replace(status, signature=before.signature)
    state.issued = max(state.issued, status.seen, status.generation, status.dead)
    if status.arrived != view.arrived:
        view.arrived, view.arrived_s = status.arrived, now_s
    if status.phase is Phase.HALTED and before.phase is not Phase.HALTED:
        view.halted_s = now_s
    knows_nothing = state.active is None and state.pending is None and not state.participants
    if status.phase is Phase.ACTIVE and knows_nothing:
        _rebuild(state, status, now_s)
    if status.phase is Phase.READY and not view.announced:
        return _admit(state, view)
    if status.phase is Phase.FAILED:
        return _fail(state, view, status.why or "the script failed without a traceback")
    return []


def _rebuild(state: CoordinatorState, status: Status, now_s: float) -> None:
    """This coordinator has no saved state, but the worker trains: take over what it reports."""
    state.active = Generation(status.generation, status.members)
    state.participants = status.members
    state.signature = state.signature or status.signature
    for w in status.members:
        if w not in state.workers:
            back_by_s = now_s + state.timing.restored_s
            state.workers[w] = WorkerView(w, since_s=now_s, heard_s=now_s, back_by_s=back_by_s, met=True)
    if not state.target and not state.pausing:
        state.target = status.members


def _admit(state: CoordinatorState, view: WorkerView) -> list[Effect]:
    """A newcomer is ready. Refuse it if its signature differs from that of the job."""
    signature = view.status.signature
    if signature is None:
        return []
    if state.signature is None:
        state.signature = signature
    difference = first_difference(state.signature, signature)
    if difference:
        return _fail(state, view, f"worker {view.worker} does not fit the job: {difference}")
    view.announced = True
    return [Emit(ev.WorkerReady(view.worker))]


def _fail(state: CoordinatorState, view: WorkerView, why: str) -> list[Effect]:
    """The worker's script failed. The job continues without a worker that does not have the whole state."""
    member = state.active is not None and view.worker in state.active.members
    holds_state = not view.status.partial and view.worker in view.status.members
    if state.active is not None and not (member and holds_state):
        return [
            Emit(ev.WorkerRefused(view.worker, why)),
            *remove(state, view, why, quiet=True),
            StopWorker(view.worker, kill=False, why="refused"),
        ]
    view.alive = False
    failed = ev.JobFailed(view.worker, why)
    return fail_after_end(state, failed) if state.outcome == "finished" else end_job(state, "failed", failed)


def take_report(state: CoordinatorState, view: WorkerView, report: Report) -> list[Effect]:
    """Pass on a worker's measurements. They change nothing that is planned or ordered."""
    events: list[ev.JobEvent] = [ev.Measured(view.worker, report)]
    if report.pause_s is not None:
        events.append(ev.PauseMeasured(view.worker, report.pause_generation, report.pause_s))
    if report.saved is not None:
        state.checkpoint, state.checkpoint_step = report.saved, report.saved_step
        events.append(ev.Checkpointed(report.saved, report.saved_step))
    members = state.active.members if state.active else ()
    slow = state.stragglers.observe(view.worker, report, members)
    if slow is not None:
        events.append(ev.StragglerFound(*slow))
    return [Emit(event) for event in events]
