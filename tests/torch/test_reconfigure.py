"""The order in which the parts of a job follow a change of members, and the loop around it: all parts are mocks."""

from __future__ import annotations

from unittest.mock import MagicMock, call

import pytest

from shoal.torch.loop import Loop
from shoal.torch.order import Position
from shoal.torch.reconfigure import Reconfiguration
from shoal.torch.session import Place
from shoal.torch.step_state import Outcome
from shoal.wire.messages import Kind, Plan

PARTS = (
    "session",
    "replica",
    "order",
    "handover",
    "vote",
    "steps",
    "checkpoints",
    "check",
    "meeting",
    "meter",
)
GROW = Plan(2, Kind.SWITCH, ("w0", "w1"), 1, ("w0",))


def make(**session) -> tuple[Reconfiguration, MagicMock]:
    parts = MagicMock()
    parts.replica.shard_set = parts.replica.shard_groups = parts.replica.sharded = None
    parts.session.configure_mock(
        outside_shoal=False,
        name="w0",
        joined=True,
        growing=False,
        interrupted=False,
        agreed=False,
        partial=False,
        finished=False,
        contributors=(0,),
        next_contributors=(0, 1),
        **session,
    )
    parts.replica.several = parts.replica.is_broken = False
    parts.session.pause_to_save.return_value = None
    parts.session.leave.side_effect = SystemExit
    parts.handover.configure_mock(final=False, window_due=False, catching_up=False)
    return Reconfiguration(*(getattr(parts, name) for name in PARTS)), parts


def calls(parts: MagicMock) -> list[str]:
    return [name for name, _, _ in parts.mock_calls]


def assert_in_order(parts: MagicMock, *wanted: str) -> None:
    found = iter(calls(parts))
    assert all(name in found for name in wanted), f"{wanted} are not in this order in {calls(parts)}"


class Replaced(Exception):
    pass


@pytest.mark.parametrize(
    ("altered", "plan", "ends"),
    [
        (True, Plan(3, Kind.FIRST, ("w0", "w1")), True),
        (True, Plan(3, Kind.FIRST, ("w0", "w1"), restore="saved.pt"), False),
        (True, Plan(3, Kind.FIRST, ("w1", "w0")), False),
        (False, Plan(3, Kind.FIRST, ("w0", "w1")), False),
    ],
    ids=["it gives its state", "it loads a checkpoint", "it receives the state", "it is fresh"],
)
def test_a_job_never_begins_with_the_traces_of_a_rehearsal(altered: bool, plan: Plan, ends: bool):
    change, parts = make()
    parts.steps.altered = altered
    parts.session.be_replaced.side_effect = Replaced
    if ends:
        with pytest.raises(Replaced):
            change._begin_first(plan)
    else:
        change._begin_first(plan)
        assert parts.order.resized.called


def test_nothing_changes_at_a_boundary_without_agreement_or_between_two_micro_batches():
    for agreed, stepped in ((False, True), (True, False)):
        change, parts = make()
        parts.session.agreed, parts.steps.stepped = agreed, stepped
        change.boundary()
        assert not parts.session.switch.called


def test_a_sharded_model_that_broke_between_two_steps_halts_there_and_uses_its_group_no_more():
    change, parts = make()
    parts.replica.is_broken = True
    parts.replica.shard_set = MagicMock()
    parts.replica.shard_set.recover.return_value = True
    parts.session.recover.return_value = Plan(3, Kind.RECOVER, ("w0",), 1, ("w0",), resume=7), False
    change.boundary()
    assert parts.session.halt.call_args == call(False)
    assert not parts.check.run_if_due.called
    assert not parts.replica.shard_set.copy_if_due.called


def test_a_switch_with_newcomers_sends_the_state_and_plans_the_data_for_them():
    change, parts = make()
    parts.session.agreed, parts.handover.final = True, True
    parts.session.switch.return_value = GROW
    change.boundary()
    assert_in_order(
        *(parts, "check.run_if_due", "session.switch", "replica.keep_stats", "check.expect"),
        *("handover.begin_sending", "order.replan", "session.notify"),
    )
    assert parts.order.replan.call_args == call((0, 1))
    assert not parts.order.resized.called, "the batch follows when the newcomers have the state"


def test_a_switch_without_newcomers_resizes_the_batch_at_once():
    change, parts = make()
    parts.session.agreed = True
    parts.session.switch.return_value = Plan(2, Kind.SWITCH, ("w0",), 1, ("w0", "w1"))
    change.boundary()
    assert_in_order(parts, "session.switch", "order.resized", "meter.pauses.append")
    assert not parts.handover.begin_sending.called


def test_a_member_that_is_not_in_the_plan_leaves_and_a_pause_is_saved_before():
    change, parts = make()
    parts.session.agreed = True
    pause = Plan(2, Kind.PAUSE, (), 1, ("w0",), save="here.pt")
    parts.session.pause_to_save.return_value = parts.session.switch.return_value = pause
    with pytest.raises(SystemExit):
        change.boundary()
    assert_in_order(parts, "checkpoints.save_for_pause", "session.saved", "session.switch", "session.leave")


@pytest.mark.parametrize("now", [True, False])
def test_survivors_enter_the_next_generation_and_the_batch_follows_now_or_after_the_step(now: bool):
    change, parts = make()
    parts.session.recover.return_value = (Plan(3, Kind.RECOVER, ("w0",), 2, ("w0",), resume=9), not now)
    parts.steps.recover.return_value = now
    change.halt(holds=True)
    assert_in_order(
        *(parts, "steps.broke", "session.halt", "session.recover", "check.expect", "handover.end"),
        "steps.recover",
    )
    assert parts.check.expect.call_args == call(after=9)
    assert parts.steps.recover.call_args == call(not now, True)
    assert parts.order.resized.called is now


def test_a_worker_with_part_of_the_state_retreats():
    change, parts = make()
    parts.session.partial = True
    change.halt(holds=False)
    assert_in_order(parts, "session.halt", "session.retreat", "handover.end", "steps.retreat")
    assert not parts.session.recover.called


def test_newcomers_that_have_everything_get_their_part_after_the_step():
    change, parts = make()
    parts.handover.complete.return_value = True
    change.step_done(MagicMock(resized=False, counted=False))
    assert_in_order(
        *(parts, "session.applied", "session.decide_alone", "session.newcomers_complete"),
        *("order.resized", "meter.pauses.append", "handover.end"),
    )


def test_a_step_that_the_recovery_has_counted_is_not_counted_again():
    change, parts = make()
    parts.handover.complete.return_value = False
    change.step_done(MagicMock(resized=True, counted=True))
    assert not parts.session.applied.called
    assert parts.order.resized.called


def test_a_newcomer_votes_when_the_plan_is_committed_and_opens_its_gate_last():
    change, parts = make()
    parts.session.joined = False
    parts.vote.early_generation = 0
    parts.session.next_place.side_effect = [Place(GROW, committed=True), Place(GROW)]

    def observe(data, vote, generation: int) -> None:
        parts.vote.early_generation = generation

    def join(plan: Plan, at_once: bool) -> MagicMock:
        parts.session.joined = True
        return MagicMock()

    parts.steps.observe.side_effect, parts.session.join.side_effect = observe, join
    change.join()
    assert_in_order(
        *(parts, "session.announce", "steps.observe", "session.join", "check.expect"),
        *("handover.begin_receiving", "handover.open_gate", "order.replan", "session.notify"),
    )
    assert parts.steps.observe.call_count == 1


def test_a_newcomer_whose_plan_is_dropped_waits_for_the_next_one():
    change, parts = make()
    parts.session.joined = False
    first = Plan(3, Kind.FIRST, ("w0",), restore="saved.pt")
    parts.session.next_place.side_effect = [Place(GROW), Place(first)]
    parts.session.join.return_value = None

    def enter(plan: Plan) -> bool:
        parts.session.joined = True
        return False

    parts.session.enter.side_effect = enter
    change.join()
    assert_in_order(
        *(parts, "session.join", "session.enter", "checkpoints.load", "session.restored"),
        *("order.resized", "replica.keep_stats", "handover.send_first"),
    )


def test_a_newcomer_without_the_whole_state_gives_up_when_the_job_is_finished():
    for catching_up in (True, False):
        change, parts = make()
        parts.session.give_up.side_effect = SystemExit
        parts.handover.catching_up = catching_up
        if catching_up:
            with pytest.raises(SystemExit):
                change.finish()
        else:
            change.finish()
        assert parts.session.finish.called is not catching_up


def make_loop(rehearse: bool = True) -> tuple[Loop, MagicMock]:
    parts = MagicMock()
    parts.session.joined, parts.steps.resume.return_value = True, False
    parts.order.position = Position()
    parts.order.next_epoch.side_effect = lambda: setattr(
        parts.order.position, "epoch", parts.order.position.epoch + 1
    )
    names = (
        "session",
        "replica",
        "order",
        "steps",
        "checkpoints",
        "reconfiguration",
        "meeting",
        "check",
        "meter",
    )
    parts.meter.sync_s = 0.0
    return Loop(*(getattr(parts, name) for name in names), rehearse), parts


def test_epochs_join_before_the_first_and_finish_after_the_last():
    loop, parts = make_loop()
    assert list(loop.epochs(3)) == [0, 1, 2]
    assert_in_order(parts, "reconfiguration.join", "session.set_away", "reconfiguration.finish")
    assert parts.reconfiguration.join.call_count == 1


def test_a_worker_that_has_retreated_joins_again_and_repeats_the_epoch():
    loop, parts = make_loop()
    epochs = loop.epochs(2)
    assert next(epochs) == 0
    parts.session.joined = False
    parts.reconfiguration.join.side_effect = lambda: setattr(parts.session, "joined", True)
    assert list(epochs) == [0, 1]


def test_workers_that_have_returned_to_an_earlier_step_repeat_its_epoch():
    loop, parts = make_loop()
    parts.steps.resume.side_effect = [False, True, False, False]
    assert list(loop.epochs(3)) == [0, 1, 1, 2]


def test_only_newcomers_rehearse():
    for first, rehearsals in ((True, 0), (False, 1)):
        loop, parts = make_loop()
        parts.session.joined = False
        parts.session.is_first_start.return_value = first
        next(loop.epochs(2))
        assert parts.steps.rehearsal.call_count == rehearsals


def test_a_broken_synchronization_halts_the_generation():
    for outcome, halts in (
        (Outcome.DONE, []),
        (Outcome.HELD, [call(holds=True)]),
        (Outcome.LOST, [call(holds=False)]),
    ):
        loop, parts = make_loop()
        parts.steps.synchronize.return_value = outcome
        loop.end_of_backward()
        assert parts.reconfiguration.halt.call_args_list == halts
