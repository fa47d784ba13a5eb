"""Workers whose scripts have come apart: they would wait for each other forever, or end after different steps.

All members of a generation run the same sequence of steps and exchanges. How many of each a member has entered is
therefore comparable: if one has entered more steps and another one more exchanges, they are not in one sequence.
"""

from __future__ import annotations

from itertools import permutations

from shoal.wire import events as ev
from shoal.wire.ending import end_job
from shoal.wire.events import Effect
from shoal.wire.messages import Phase, Status
from shoal.wire.state import CoordinatorState

_IN_STEP = (Phase.ACTIVE, Phase.HALTED, Phase.FINISHED)
_TOGETHER = "Let all workers decide together: if job.any(flag): break"


def fail_if_apart(state: CoordinatorState) -> list[Effect]:
    """End the job as failed if its workers can no longer reach the end together."""
    if state.active is None:
        return []
    views = [v for w in state.participants if (v := state.workers.get(w)) is not None]
    here = [v for v in views if v.status.phase in _IN_STEP and not v.status.partial]
    for one, other in permutations(here, 2):
        why = difference(one.worker, one.status, other.worker, other.status)
        if why is not None:
            return end_job(state, "failed", ev.JobFailed(one.worker, why))
    return []


def difference(name: str, one: Status, other_name: str, other: Status) -> str | None:
    """Why `one`, which is behind `other`, will never follow it. None: it may."""
    if one.generation > other.generation:
        return None
    if one.phase is Phase.FINISHED and one.arrived < other.arrived:
        return (
            f"the script of {name} ended after step {one.arrived}, and {other_name} went on to step {other.arrived}: "
            f"they must end together. {_TOGETHER}"
        )
    if one.phase is Phase.FINISHED and _waits_in_vain(one, other):
        return (
            f"the script of {name} ended after step {one.arrived}, and {other_name} went on and waits for a value of "
            f"it: they must end together. {_TOGETHER}"
        )
    if one.generation == other.generation and one.arrived < other.arrived and one.exchanges > other.exchanges:
        return (
            f"{name} waits for a value of {other_name} (in job.mean, job.any, job.broadcast, job.gather or the end of "
            f"an evaluation), and {other_name} went on to step {other.arrived} without giving one: every worker must "
            f"call these at the same point, not within `if job.is_main`. {_TOGETHER}"
        )
    return None


def _waits_in_vain(ended: Status, other: Status) -> bool:
    """Whether `other`, which goes on after the same step, has entered an exchange that the ended script has not."""
    goes_on = other.phase in (Phase.ACTIVE, Phase.HALTED) and other.arrived == ended.arrived
    return goes_on and other.generation == ended.generation and other.exchanges > ended.exchanges
