"""Lost workers: how a loss is noticed, and how the survivors continue."""

from __future__ import annotations

from shoal.wire import events as ev
from shoal.wire.ending import end_job
from shoal.wire.events import Effect, Emit, StopWorker
from shoal.wire.groups import unbroken
from shoal.wire.messages import Kind, Phase
from shoal.wire.planning import issue
from shoal.wire.state import CoordinatorState, WorkerView

_ENDED = (Phase.LEFT, Phase.FINISHED)
MAX_VAIN_BREAKS = 3
"""A step that breaks so often without a lost worker would break for ever: one of its collectives fails by itself."""


def check_liveness(state: CoordinatorState, view: WorkerView, now_s: float) -> list[Effect]:
    """Give up a worker that is silent, disconnected, does not start, or holds the others up."""
    silent_s = now_s - view.heard_s
    status, timing = view.status, state.timing
    limit_s = timing.away_timeout_s if status.away else timing.heartbeat_timeout_s
    if view.connected and silent_s > limit_s:
        return give_up(state, view, f"no sign of life for {silent_s:.1f} s")
    if not view.connected and view.met and silent_s > timing.reconnect_s and now_s > view.back_by_s:
        return give_up(state, view, "its connection closed")
    if status.phase is Phase.STARTING and now_s > max(view.since_s + timing.start_s, view.back_by_s):
        return give_up(state, view, f"not ready after {timing.start_s:.0f} s")
    if status.phase is Phase.ACTIVE and not state.recovering and _hangs(state, view, now_s):
        return give_up(state, view, f"did not arrive at step {view.arrived + 1} where the others wait")
    return []


def _hangs(state: CoordinatorState, view: WorkerView, now_s: float) -> bool:
    """Whether others have waited too long for it at a step.

    Rank 0 may evaluate or save for minutes between two steps, so a worker that is away has more time.
    """
    generation = view.status.generation
    peers = [p for p in state.alive(view.status.members) if p.status.generation == generation]
    ahead = [p.arrived_s for p in peers if p.arrived > view.arrived]
    limit_s = state.timing.away_s if view.status.away else state.timing.hang_s
    return bool(ahead) and now_s - max(*ahead, view.arrived_s) > limit_s


def give_up(state: CoordinatorState, view: WorkerView, why: str) -> list[Effect]:
    """Count a worker as lost and kill its process."""
    return [*remove(state, view, why), StopWorker(view.worker, kill=True, why=why)]


def remove(state: CoordinatorState, view: WorkerView, why: str, quiet: bool = False) -> list[Effect]:
    """Take a worker that has ended out of the job.

    Its generation breaks only if the worker may hold state and was to continue.
    """
    _mark_dead(state, view)
    state.stragglers.forget(view.worker)
    expected = view.stopping or view.status.phase in _ENDED
    participant = view.worker in state.participants
    effects: list[Effect] = []
    if participant:
        state.vain_breaks = 0
    if not expected and not quiet:
        effects.append(Emit(ev.WorkerLost(view.worker, why, participant)))
    if participant and view.status.phase not in _ENDED:
        state.break_generation()
    elif state.pending and not state.pending.committed and view.worker in state.pending.plan.members:
        state.pending = None
    return effects


def notice_broken_steps(state: CoordinatorState, now_s: float) -> list[Effect]:
    """A member that halted by itself saw a collective fail. Find the lost worker, or re-form the same members."""
    if state.recovering:
        return []
    participants = state.alive(state.participants)
    halted = [v for v in participants if v.status.phase is Phase.HALTED and v.status.generation > state.dead]
    if not halted:
        return []
    effects: list[Effect] = []
    disconnected = [v for v in participants if not v.connected]
    for view in disconnected:
        if now_s > view.back_by_s:  # a restarted coordinator has not heard of healthy workers yet
            effects += give_up(state, view, "its connection closed and a step broke")
    if not disconnected and now_s - min(v.halted_s for v in halted) >= state.timing.settle_s:
        return _repeat(state, halted)
    return effects


def _repeat(state: CoordinatorState, halted: list[WorkerView]) -> list[Effect]:
    """Form the same members again, unless that was in vain too often."""
    step = max(v.status.step for v in halted)
    state.vain_breaks = state.vain_breaks + 1 if step == state.broken_step else 1
    state.broken_step = step
    if state.vain_breaks < MAX_VAIN_BREAKS:
        state.break_generation()
        return []
    why = (
        f"what the workers do together after step {step} broke {state.vain_breaks} times, though no worker was lost: "
        "see 'a collective broke' in their output"
    )
    return end_job(state, "failed", ev.JobFailed(halted[0].worker, why))


def recover(state: CoordinatorState) -> list[Effect]:
    """Once all survivors have stopped: form a generation of those that hold the state of the last completed step."""
    participants = state.alive(state.participants)
    over = (*_ENDED, Phase.FAILED)
    for view in participants:
        stopped = view.status.phase in (Phase.HALTED, Phase.READY) and view.status.dead >= state.dead
        if not stopped and view.status.phase not in over:
            return []
    state.recovering = False
    # Workers with partial state receive it again in a later generation.
    holders = [v for v in participants if v.status.phase is Phase.HALTED and not v.status.partial]
    if not holders:
        state.active, state.participants, state.stranded = None, (), True
        return [Emit(ev.JobStranded(state.checkpoint, "no worker is left that holds its state"))]
    ends = [v.status.step for w in state.participants if (v := state.workers[w]).status.phase in over]
    resume = resume_step([(v.status.step, v.status.holds) for v in holders], ends)
    able = [v for v in holders if v.status.step == resume or (v.status.holds and v.status.step == resume - 1)]
    effects: list[Effect] = []
    members = unbroken({v.worker: v.status.members for v in able}, state.group)
    for view in holders:
        if view not in able:
            effects += _discard(state, view, "it is behind the others")
        elif view.worker not in members:
            effects += _discard(state, view, "its shard group lost a worker")
    state.participants = members
    if not members:
        state.active = None
        return effects
    issue(state, Kind.RECOVER, state.participants, holders=state.participants, resume=resume)
    return effects


def resume_step(holders: list[tuple[int, bool]], ends: list[int]) -> int:
    """The step that all continue from, given (steps done, holds the gradients of the next) of each halted survivor.

    The vote that ends a step completes only if every member has complete gradients. So if a worker is ahead, those
    behind hold the gradients. If all hold them, all can apply them. Otherwise none has applied them and the step is
    repeated.
    """
    furthest = max([done for done, _ in holders] + ends)
    if all(holds and done == furthest for done, holds in holders):
        return furthest + 1
    return furthest


def announce_if_stranded(state: CoordinatorState) -> list[Effect]:
    """Emit `JobStranded` once when no worker is left, also if none of them ever held the state.

    `recover` emits it when the last worker that held the state is lost. A new target starts from the checkpoint.
    """
    no_state = state.active is None and not state.participants and state.paused is None and not state.pausing
    stranded = no_state and bool(state.workers) and not any(v.alive for v in state.workers.values())
    first_time = stranded and not state.stranded
    state.stranded = stranded
    return [Emit(ev.JobStranded(state.checkpoint, "no worker is left"))] if first_time else []


def _discard(state: CoordinatorState, view: WorkerView, why: str) -> list[Effect]:
    """During a recovery: end a worker that cannot be a member of the next generation."""
    _mark_dead(state, view)
    lost = ev.WorkerLost(view.worker, why, was_member=True)
    return [Emit(lost), StopWorker(view.worker, kill=True, why=why)]


def _mark_dead(state: CoordinatorState, view: WorkerView) -> None:
    view.alive, view.connected = False, False
    state.target = tuple(w for w in state.target if w != view.worker)
