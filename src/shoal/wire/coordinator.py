"""The coordinator of one job: which workers it shall have, and how it gets there. Pure: no I/O, no clock.

Each function here is one input. It changes the `CoordinatorState` and returns effects for the caller to carry out.
Every input ends in `_advance`, which looks at the whole state and takes the next step, so a repeated or late input
does no harm. A job has one `active` generation and at most one `pending` one:

    newcomers and leavers    the union of both first (newcomers take part without a share of the batch while they
                             receive the state), then a switch without the leavers, whose group forms meanwhile
    newer target             replaces an uncommitted plan at once; a committed plan is a step or two from its switch,
                             and newcomers that are no longer wanted leave while they still receive the state
    a member lost            all generations so far are dead, survivors halt and report how far they came, and a
                             recovery generation continues from the last completed step
    no worker left           the next target starts from the last checkpoint
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from shoal.wire import apart, ending, inputs, losses, planning
from shoal.wire import events as ev
from shoal.wire.events import Effect, Send, StartWorker
from shoal.wire.messages import Order, Report, Status
from shoal.wire.state import CoordinatorState, WorkerView


def set_target(state: CoordinatorState, workers: Sequence[str], now_s: float) -> list[Effect]:
    """Set the workers the job shall have, in rank order. No workers: pause. A worker id is used only once."""
    if len(set(workers)) != len(workers):
        raise ValueError("a worker is named twice in the target")
    ended = [w for w in workers if w in state.workers and not state.workers[w].alive]
    if ended:
        raise ValueError(f"worker {ended[0]!r} has ended; give its replacement a new id")
    effects: list[Effect] = []
    if state.outcome is None:
        state.target, state.pausing = tuple(workers), not workers
        for w in workers:
            if w not in state.workers:
                state.workers[w] = WorkerView(w, since_s=now_s, heard_s=now_s)
                effects.append(StartWorker(w))
    return effects + _advance(state, now_s)


def ask_checkpoint(state: CoordinatorState, now_s: float) -> list[Effect]:
    state.checkpoints_asked += 1
    return _advance(state, now_s)


def stop(state: CoordinatorState, why: str, now_s: float) -> list[Effect]:
    """End the job now, without saving."""
    return ending.end_job(state, "stopped", ev.JobFailed("", why)) + _advance(state, now_s)


def connected(state: CoordinatorState, worker: str, now_s: float) -> list[Effect]:
    """A worker has connected or reconnected. Its first status follows."""
    view = state.workers.get(worker)
    if view is None:
        # This coordinator has no saved state: `received` rebuilds it from the worker's status.
        view = state.workers[worker] = WorkerView(worker, since_s=now_s)
    view.connected, view.met, view.heard_s, view.back_by_s = True, True, now_s, 0.0
    view.status = replace(view.status, seq=0)
    view.sent = Order(seq=0)
    return _advance(state, now_s)


def disconnected(state: CoordinatorState, worker: str, now_s: float) -> list[Effect]:
    if worker in state.workers:
        state.workers[worker].connected = False
        state.workers[worker].heard_s = now_s
    return _advance(state, now_s)


def exited(
    state: CoordinatorState, worker: str, why: str, now_s: float, *, by_itself: bool = True
) -> list[Effect]:
    """The executor saw the worker's process end, `by_itself` or because something killed it."""
    view = state.workers.get(worker)
    if view is None or not view.alive:
        return []
    effects = losses.remove(state, view, why)
    if by_itself and not view.met and state.issued == 0 and not view.stopping:
        # The script itself does not start: another attempt would fail again.
        hint = "a command that never calls it needs a fixed number of GPUs"
        failed = ev.JobFailed(worker, f"{why} (it had not reached shoal.torch.init(); {hint})")
        effects += ending.end_job(state, "failed", failed)
    return effects + _advance(state, now_s)


def received(state: CoordinatorState, worker: str, message: Status | Report, now_s: float) -> list[Effect]:
    """A message of a worker has arrived."""
    view = state.workers.get(worker)
    if view is None or not view.alive:
        return []
    view.heard_s = now_s
    if isinstance(message, Report):
        return inputs.take_report(state, view, message)
    effects: list[Effect] = []
    if message.seq > view.status.seq:
        effects = inputs.take_status(state, view, message, now_s)
    return effects + _advance(state, now_s)


def tick(state: CoordinatorState, now_s: float) -> list[Effect]:
    """Check time-outs and repeat unanswered orders. Call it about once a second."""
    effects: list[Effect] = []
    for view in list(state.workers.values()):
        if view.alive:
            effects += losses.check_liveness(state, view, now_s)
    effects += _advance(state, now_s)
    if state.pending is not None or state.recovering:
        sent = {e.worker for e in effects if isinstance(e, Send)}
        for view in state.workers.values():
            if view.alive and view.connected and view.sent.seq and view.worker not in sent:
                effects.append(Send(view.worker, view.sent))
    return effects


def _advance(state: CoordinatorState, now_s: float) -> list[Effect]:
    """Take every step that the state allows now."""
    effects: list[Effect] = []
    if state.outcome is None:
        effects += apart.fail_if_apart(state)
    if state.outcome is None:
        effects += losses.notice_broken_steps(state, now_s)
        effects += ending.finish_if_done(state)
    if state.outcome is None:
        if state.recovering:
            effects += losses.recover(state)
        if not state.recovering:
            effects += planning.settle_pending(state)
            effects += planning.announce_generation(state)
            planning.plan_next(state)
            effects += losses.announce_if_stranded(state)
        effects += ending.stop_unwanted(state)
    return effects + planning.send_orders(state)
