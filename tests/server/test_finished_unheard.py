"""A worker that ends with exit code 0 while nobody hears it: has the job finished, or has the worker left?"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from shoal.executors.base import Exit
from shoal.server.loop.elastic_runner import _finished_unheard
from shoal.server.loop.live_job import ACTIVE, LEAVING
from shoal.wire.messages import Kind, Phase, Plan, Status
from shoal.wire.state import CoordinatorState, Generation, Pending, WorkerView


def finished(
    phase: Phase = Phase.ACTIVE,
    seq: int = 0,
    *,
    active: bool = True,
    plan: Plan | None = None,
    committed: bool = True,
    **changes: Any,
) -> bool:
    state = CoordinatorState("7")
    state.workers["w"] = WorkerView("w", since_s=0.0, met=True, status=Status(seq=seq, phase=phase))
    state.active = Generation(3, ("w",)) if active else None
    state.pending = None if plan is None else Pending(plan, committed=committed)
    handle: Any = SimpleNamespace(state=state)
    worker: Any = SimpleNamespace(id="w", state=changes.get("worker_state", ACTIVE))
    return _finished_unheard(handle, worker, Exit("w", changes.get("code", 0), None, ""))


def test_a_member_that_ended_by_itself_without_a_word_has_finished() -> None:
    assert finished()


def test_a_member_of_a_committed_plan_has_finished_though_nobody_heard_that_it_was_carried_out() -> None:
    first = Plan(1, Kind.FIRST, ("w",), holders=())
    assert finished(active=False, plan=first)
    assert not finished(active=False, plan=first, committed=False)


@pytest.mark.parametrize(
    "told",
    [
        {"active": False},  # the pause is complete: the job may have been resumed since
        {"phase": Phase.LEFT},
        {"plan": Plan(4, Kind.PAUSE, (), holders=("w",))},  # the server was killed while the pause was made
        {"plan": Plan(4, Kind.SWITCH, ("v",), holders=("w",))},
        {"worker_state": LEAVING},
        {"seq": 1},  # it would have said that it has finished
        {"code": 1},
    ],
)
def test_a_worker_that_left_by_a_plan_or_was_heard_has_not(told: dict[str, Any]) -> None:
    assert not finished(**told)
