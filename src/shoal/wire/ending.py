"""How a job ends, and how workers that it no longer needs are stopped."""

from __future__ import annotations

from shoal.wire import events as ev
from shoal.wire.events import Effect, Emit, StopWorker
from shoal.wire.messages import Phase
from shoal.wire.state import CoordinatorState


def end_job(state: CoordinatorState, outcome: str, event: ev.JobEvent) -> list[Effect]:
    """End the job and stop its workers. Does nothing if it has ended before."""
    if state.outcome is not None:
        return []
    state.outcome, state.pending, state.recovering = outcome, None, False
    effects: list[Effect] = [Emit(event)]
    for view in state.workers.values():
        if not view.alive or view.stopping:
            continue
        view.stopping, view.why = True, f"the job has {outcome}"
        if view.status.phase is not Phase.FINISHED:  # a script that is done may still save or evaluate
            effects.append(StopWorker(view.worker, kill=False, why=view.why))
    return effects


def fail_after_end(state: CoordinatorState, event: ev.JobFailed) -> list[Effect]:
    """The training was done, and what follows it in a worker's script failed. The others may complete theirs."""
    state.outcome = "failed"
    return [Emit(event)]


def finish_if_done(state: CoordinatorState) -> list[Effect]:
    """End the job once all its participants have done all steps."""
    participants = [v for w in state.participants if (v := state.workers.get(w)) is not None]
    finished = [v for v in participants if v.status.phase is Phase.FINISHED]
    # A newcomer whose switch did not happen before the last step has nothing to wait for.
    over = (Phase.FINISHED, Phase.LEFT, Phase.READY)
    if finished and all(v.status.phase in over or not v.alive for v in participants):
        last = max(finished, key=lambda v: v.status.step).status
        return end_job(state, "finished", ev.JobFinished(last.step, last.why))
    return []


def stop_unwanted(state: CoordinatorState) -> list[Effect]:
    """Stop workers that neither the target names nor the job still needs."""
    effects: list[Effect] = []
    wanted = {*state.target, *state.participants}
    for view in state.workers.values():
        unheard = view.connected and view.status.seq == 0  # its first status may say that it trains
        if view.alive and not view.stopping and not unheard and view.worker not in wanted:
            view.stopping = True
            effects.append(StopWorker(view.worker, kill=False, why=view.why))
    return effects
