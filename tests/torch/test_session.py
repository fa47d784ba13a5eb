"""Membership by itself: a real wire member, without a control link, sockets or processes."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from shoal.torch.session import Session
from shoal.torch.worker import Groups, Worker
from shoal.wire.member import Member
from shoal.wire.messages import Kind, Order, Phase, Plan


class FakeWorker:
    """The parts of a `Worker` that a session uses. Groups are formed at once."""

    def __init__(self, name: str) -> None:
        self.name, self.member, self.cuda = name, Member(name), False
        self.identity = SimpleNamespace(job="job")
        self.lock = threading.Condition(threading.RLock())
        self.link = SimpleNamespace(say=lambda: None, say_now=lambda: None)
        self.incoming: dict[int, SimpleNamespace] = {}
        self.receiver = SimpleNamespace(
            address="here:1", get=self.incoming.get, forget=lambda number: self.incoming.pop(number, None)
        )
        self.interrupted, self.entering, self.quit = False, None, None
        self.groups: dict[int, Groups] = {}
        self.retired: list[str] = []

    def plan(self, plan: Plan, seq: int, commit: bool = True) -> None:
        self.member.order(Order(seq, plan=plan, commit=commit))
        self.groups[plan.number] = Groups(f"data {plan.number}", f"vote {plan.number}", [])
        self.member.group_formed(plan.number)
        self.entering = plan if plan.kind in (Kind.FIRST, Kind.RECOVER) else None

    def formed(self, number: int) -> Groups | None:
        return self.groups.get(number)

    def take(self, number: int) -> Groups:
        return self.groups.pop(number)

    def retire(self, groups: Groups | None) -> None:
        if groups is not None:
            self.retired.append(groups.data)

    def wait_for(self, ready):
        value = ready()
        assert value, "it would wait forever"
        return value


FIRST = Plan(1, Kind.FIRST, ("w0", "w1"))
GROW = Plan(2, Kind.SWITCH, ("w0", "w1", "w2"), 1, ("w0", "w1"))


def joined(name: str = "w1") -> tuple[Session, FakeWorker]:
    worker = FakeWorker(name)
    session = Session(worker)  # type: ignore[arg-type]
    session.announce(("a model",))
    worker.plan(FIRST, seq=1)
    session.enter(session.next_place(voted=0).plan)
    session.state_complete(0)
    return session, worker


def test_outside_shoal_a_session_is_one_member_for_good():
    session = Session(None)
    assert session.joined
    assert (session.rank, session.world_size, session.generation) == (0, 1, 0)
    assert (session.contributors, session.growing, session.links) == ((0,), False, [])
    assert session.set_away(True)


def test_a_first_generation_makes_all_members_contributors():
    session, _ = joined()
    assert session.joined
    assert (session.rank, session.world_size, session.generation) == (1, 2, 1)
    assert session.contributors == session.next_contributors == (0, 1)
    assert (session.data_group, session.vote_group) == ("data 1", "vote 1")


def test_while_newcomers_receive_the_state_the_holders_sum_among_themselves():
    session, worker = joined()
    worker.plan(GROW, seq=2)
    session.agree(session.flag())
    assert session.switch() is GROW
    assert session.growing
    assert (session.contributors, session.next_contributors) == ((0, 1), (0, 1, 2))
    assert session.summing(sync="ours")[0] == "data 1"  # type: ignore[arg-type]
    assert session.sends_sums
    session.newcomers_complete()
    assert session.contributors == (0, 1, 2)
    assert session.summing(sync="ours")[0] == "data 2"  # type: ignore[arg-type]
    assert worker.retired == ["data 1"]


def test_a_member_that_is_not_in_the_next_generation_has_left(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("shoal.torch.session.lower_priority", lambda: None)
    session, worker = joined()
    worker.plan(Plan(2, Kind.SWITCH, ("w0",), 1, ("w0", "w1")), seq=2)
    session.agree(session.flag())
    plan = session.switch()
    assert plan is not None
    assert session.name not in plan.members
    assert worker.member.phase is Phase.LEFT
    worker.quit = "left"
    with pytest.raises(SystemExit):
        session.leave()


@pytest.mark.parametrize(("holds", "applies"), [(True, True), (False, False)])
def test_survivors_of_a_broken_generation_enter_the_next_one(holds: bool, applies: bool):
    session, worker = joined()
    session.halt(holds)
    worker.plan(Plan(2, Kind.RECOVER, ("w1",), 1, ("w1",), resume=1 if applies else 0), seq=2)
    plan, apply = session.recover()
    assert (plan.number, apply) == (2, applies)
    assert (session.rank, session.world_size, session.contributors) == (0, 1, (0,))


def test_a_newcomer_sees_the_committed_plan_once_and_then_the_offer():
    worker = FakeWorker("w2")
    session = Session(worker)  # type: ignore[arg-type]
    session.announce(("a model",))
    worker.plan(GROW, seq=1)
    place = session.next_place(voted=0)
    assert (place.plan, place.committed) == (GROW, True)
    with pytest.raises(AssertionError, match="wait forever"):
        session.next_place(voted=2)
    worker.incoming[2] = SimpleNamespace(offered=7)
    place = session.next_place(voted=2)
    assert (place.plan, place.committed) == (GROW, False)
    assert session.join(GROW) is worker.incoming[2]
    assert session.partial
    assert session.contributors == (0, 1)


def test_a_newcomer_with_part_of_the_state_retreats_and_may_join_again():
    worker = FakeWorker("w2")
    session = Session(worker)  # type: ignore[arg-type]
    session.announce(("a model",))
    worker.plan(GROW, seq=1)
    worker.incoming[2] = SimpleNamespace(offered=7)
    session.join(GROW)
    worker.member.order(Order(2, dead=2))
    session.halt(holds=False)
    session.retreat()
    assert not session.joined
    assert session.retreated
    assert worker.member.phase is Phase.READY
    assert (session.contributors, session.data_group) == ((0,), None)


def test_a_plan_that_was_dropped_at_the_last_moment_is_not_joined():
    worker = FakeWorker("w2")
    session = Session(worker)  # type: ignore[arg-type]
    session.announce(("a model",))
    worker.plan(GROW, seq=1)
    assert session.join(GROW) is None
    assert not session.joined


def test_a_single_member_decides_without_a_vote():
    worker = FakeWorker("w0")
    session = Session(worker)  # type: ignore[arg-type]
    session.announce(("a model",))
    worker.plan(Plan(1, Kind.FIRST, ("w0",)), seq=1)
    session.enter(session.next_place(voted=0).plan)
    asked: list[int] = []
    session.decide_alone(asked.append)
    assert not session.agreed
    worker.plan(Plan(2, Kind.SWITCH, ("w0", "w1"), 1, ("w0",)), seq=2)
    session.decide_alone(asked.append)
    assert session.agreed
    assert asked == [2]


def test_a_generation_that_was_dropped_at_the_last_moment_is_not_entered():
    """Another worker is lost after the group of the survivors has formed and before all have entered it."""
    session, worker = joined()
    session.halt(holds=False)
    worker.member.order(Order(2, dead=1))
    worker.plan(Plan(2, Kind.RECOVER, ("w0", "w1"), 1, ("w0", "w1"), resume=0), seq=3)
    dropped = worker.entering
    assert dropped is not None
    worker.entering = None
    assert session.enter(dropped) is None
    assert worker.member.phase is Phase.HALTED


def test_a_worker_drops_a_plan_that_it_was_about_to_enter():
    plan = Plan(2, Kind.RECOVER, ("w0",), 1, ("w0",))
    worker = SimpleNamespace(
        entering=plan,
        _stores={},
        _groups={},
        receiver=SimpleNamespace(forget=lambda number: None),
    )
    Worker._drop(worker, 3)  # type: ignore[arg-type]
    assert worker.entering is plan
    Worker._drop(worker, 2)  # type: ignore[arg-type]
    assert worker.entering is None


def test_after_a_return_to_an_earlier_step_the_coordinator_compares_from_there():
    session, worker = joined()
    for step in (1, 2, 3):
        session.arrived(step)
        session.applied()
    session.restored(1)
    status = worker.member.status()
    assert (status.step, status.arrived) == (1, 1)


def test_a_finished_worker_waits_for_a_control_plane_that_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = FakeWorker("w0")
    worker.link.up = threading.Event()
    session, heard = Session(worker), []  # type: ignore[arg-type]
    monkeypatch.setattr(session, "wait_for_quit", lambda: heard.append(worker.link.up.is_set()))
    worker.member.phase = Phase.ACTIVE
    session.await_end()
    assert not heard, "only a finished worker waits"
    worker.member.phase = Phase.FINISHED
    ending = threading.Thread(target=session.await_end)
    ending.start()
    worker.link.up.set()
    ending.join(20)
    assert heard == [True]
