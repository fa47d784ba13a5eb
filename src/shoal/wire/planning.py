"""From the active generation to the target: the next plan, its commit, and the order for each worker."""

from __future__ import annotations

from msgspec.structs import replace

from shoal.wire import events as ev
from shoal.wire.events import Effect, Emit, Send
from shoal.wire.groups import regrouped, whole, without_groups_of
from shoal.wire.messages import Kind, Order, Phase, Plan
from shoal.wire.state import CoordinatorState, Generation, Pending, WorkerView


def settle_pending(state: CoordinatorState) -> list[Effect]:
    """Drop, commit or complete the pending generation, depending on what its members report."""
    if state.pending is None:
        return []
    plan = state.pending.plan
    members = [state.workers[w] for w in plan.members]
    broken = any(v.status.broken == plan.number for v in members)
    if not state.pending.committed:
        # A group that could not be formed is tried again under a new number.
        if broken or next_wish(state) != (plan.kind, plan.members):
            state.pending = None
            return []
        formed = all(plan.number in (v.status.formed, v.status.generation) for v in members)
        # All who stay must have the whole state before any worker that has it may leave.
        if not formed or set(state.learners()) & set(plan.members):
            return []
        state.pending.committed = True
        state.participants = tuple(dict.fromkeys((*state.participants, *plan.members)))
    elif broken and plan.kind in (Kind.RECOVER, Kind.FIRST):
        state.break_generation()
        return []
    return _complete(state, plan, members)


def _complete(state: CoordinatorState, plan: Plan, members: list[WorkerView]) -> list[Effect]:
    """Make the committed generation the active one when all members are in it and all leavers have left."""
    if not all(_has_entered(v, plan) for v in members):
        return []
    before = (*plan.holders, *plan.learners)
    leavers = [state.workers[w] for w in before if w not in plan.members]
    if any(v.alive and v.status.phase not in (Phase.LEFT, Phase.FINISHED) for v in leavers):
        return []
    effects: list[Effect] = [Emit(ev.WorkerLeft(v.worker)) for v in leavers]
    # A newer target that wants a leaver again is too late: its process ends, and a new worker must replace it.
    state.target = tuple(w for w in state.target if w not in before or w in plan.members)
    state.pending = None
    state.active = Generation(plan.number, plan.members) if plan.members else None
    state.participants = plan.members
    state.paused = None
    if plan.kind is Kind.PAUSE:
        step = max((v.status.step for v in leavers), default=0)
        state.paused = next((v.status.saved for v in leavers if v.status.saved), None)
        if state.paused is not None:  # also after it has resumed, until a later checkpoint
            state.checkpoint, state.checkpoint_step = state.paused, step
        effects.append(Emit(ev.JobPaused(state.paused or "", step)))
    else:
        state.unannounced = plan.kind
    return effects


def _has_entered(view: WorkerView, plan: Plan) -> bool:
    """After a switch, newcomers may still be receiving the state: the next plan can be prepared meanwhile."""
    status = view.status
    working = status.phase is Phase.ACTIVE and (plan.kind is Kind.SWITCH or not status.partial)
    return status.generation == plan.number and (working or status.phase is Phase.FINISHED)


def announce_generation(state: CoordinatorState) -> list[Effect]:
    """Emit `GenerationCommitted` once all members of the active generation have the whole state."""
    if state.unannounced is None or state.active is None or state.learners():
        return []
    views = [v for w in state.active.members if (v := state.workers.get(w)) is not None]
    if any(v.status.generation < state.active.number for v in views):
        return []  # this coordinator has restarted and has not heard from all members yet
    step = max((v.status.step for v in views), default=0)
    state.stragglers.reset()
    committed = ev.GenerationCommitted(state.active.number, state.active.members, step, state.unannounced)
    state.unannounced = None
    return [Emit(committed)]


def next_wish(state: CoordinatorState) -> tuple[Kind, tuple[str, ...]] | None:
    """The next generation on the way to the target, whether it can be formed yet or not."""
    wanted, size = tuple(v.worker for v in state.alive(state.target)), state.group
    if state.active is None:
        first = whole(wanted, size)
        return (Kind.FIRST, first) if first else None
    if not wanted:
        # The target may also be empty because all newcomers died. Then the job continues as it is.
        return (Kind.PAUSE, ()) if state.pausing else None
    current = state.active.members
    unwanted_learners = [w for w in state.learners() if w not in wanted]
    if unwanted_learners:
        return Kind.SWITCH, without_groups_of(current, unwanted_learners, size)
    newcomers = whole([w for w in wanted if w not in current], size)
    if newcomers:
        return Kind.SWITCH, current + newcomers
    remaining = regrouped(current, wanted, size)
    return (Kind.SWITCH, remaining) if remaining and remaining != current else None


def plan_next(state: CoordinatorState) -> None:
    """Issue the next plan if there is none and all its newcomers are ready."""
    if state.pending is not None or state.outcome is not None:
        return
    wish = next_wish(state)
    if wish is None:
        return
    kind, members = wish
    current = state.active.members if state.active else ()
    newcomers = [state.workers[w] for w in members if w not in current]
    if all(v.announced and v.connected and v.status.phase is Phase.READY for v in newcomers):
        learners = tuple(w for w in state.learners() if w not in members)
        holders = tuple(w for w in current if w not in learners)
        issue(state, kind, members, holders=holders, learners=learners)


def issue(
    state: CoordinatorState,
    kind: Kind,
    members: tuple[str, ...],
    holders: tuple[str, ...],
    learners: tuple[str, ...] = (),
    resume: int = 0,
) -> None:
    """Make a new plan the pending one."""
    state.issued += 1
    newcomers = [w for w in members if w not in holders]
    leavers = [w for w in holders if w not in state.target]
    plan = Plan(
        number=state.issued,
        kind=kind,
        members=members,
        previous=state.active.number if state.active else 0,
        holders=holders,
        learners=learners,
        replaces=dict(zip(newcomers, leavers)),
        addresses={w: state.workers[w].status.address for w in newcomers},
        resume=resume,
        restore=_checkpoint_for(state, kind),
        save=state.pause_path if kind is Kind.PAUSE else None,
        group=state.group,
    )
    # Only a switch needs a commit: no member of the others trains, or (pause) there is no group to form.
    state.pending = Pending(plan, committed=kind is not Kind.SWITCH)
    if kind is Kind.FIRST:
        state.participants = members


def _checkpoint_for(state: CoordinatorState, kind: Kind) -> str | None:
    """A recovery needs it if the lost worker took a part of a sharded model with it."""
    if kind is Kind.FIRST:
        return state.paused or state.checkpoint
    return state.checkpoint if kind is Kind.RECOVER else None


def send_orders(state: CoordinatorState) -> list[Effect]:
    """Send each worker its order if the order has changed."""
    effects: list[Effect] = []
    for view in state.workers.values():
        if not view.alive or not view.connected:
            continue
        order = _order_for(state, view)
        if order != replace(view.sent, seq=0) or view.sent.seq == 0:
            view.sent = replace(order, seq=view.sent.seq + 1)
            effects.append(Send(view.worker, view.sent))
    return effects


def _order_for(state: CoordinatorState, view: WorkerView) -> Order:
    plan, committed = (state.pending.plan, state.pending.committed) if state.pending else (None, False)
    if plan is not None and view.worker not in (*plan.members, *plan.holders, *plan.learners):
        plan = None
    return Order(
        seq=0,
        dead=state.dead,
        plan=plan,
        commit=plan is not None and committed,
        board=_board(state, plan) if plan is not None and view.worker in plan.members else {},
        signed=view.announced,
        first=state.active is None,
        fresh=state.active is None and not (state.paused or state.checkpoint),
        lead=state.active is None and [v.worker for v in state.alive(state.target)][:1] == [view.worker],
        checkpoint=state.checkpoints_asked,
        stop=view.why if view.stopping else None,
    )


def _board(state: CoordinatorState, plan: Plan) -> dict[str, str]:
    """The rendezvous entries of all members once each has sent its own: one message instead of one per entry."""
    entries: dict[str, str] = {}
    for view in state.alive(plan.members):
        if view.status.board_of != plan.number or not view.status.board:
            return {}
        entries |= view.status.board
    return entries
