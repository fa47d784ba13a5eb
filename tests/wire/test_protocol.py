"""The reconfiguration protocol against an adversary: what must never happen, and that peace always heals."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from protocol_world import World

from shoal.wire import coordinator
from shoal.wire.events import Emit, GenerationCommitted, JobFailed, JobPaused, WorkerLost, WorkerRefused
from shoal.wire.messages import Kind, Phase
from shoal.wire.state import CoordinatorState, Timing

SMALL = st.integers(0, 7)


class Adversary(RuleBasedStateMachine):
    group = 1

    @initialize(seed=st.integers(0, 10**6), size=st.integers(1, 3))
    def begin(self, seed: int, size: int) -> None:
        self.world = World(seed, self.group)
        self.world.set_target(self.world.new_names(size * self.group))
        self.world.peace(12)

    def _pick(self, choice: int, some: list[str]) -> str | None:
        return some[choice % len(some)] if some else None

    @rule(choice=SMALL, index=SMALL, keep=st.booleans())
    def deliver_some_order(self, choice: int, index: int, keep: bool) -> None:
        name = self._pick(choice, [n for n, w in self.world.workers.items() if w.orders])
        if name:
            self.world.deliver_order(name, index % len(self.world.workers[name].orders), keep)

    @rule(choice=SMALL, index=SMALL, keep=st.booleans())
    def deliver_some_status(self, choice: int, index: int, keep: bool) -> None:
        name = self._pick(choice, [n for n, w in self.world.workers.items() if w.statuses])
        if name:
            self.world.deliver_status(name, index % len(self.world.workers[name].statuses), keep)

    @rule(choice=SMALL)
    def lose_what_is_under_way(self, choice: int) -> None:
        name = self._pick(choice, list(self.world.workers))
        if name:
            self.world.workers[name].orders.clear()
            self.world.workers[name].statuses.clear()

    @rule(choices=st.lists(SMALL, min_size=1, max_size=12))
    def workers_move(self, choices: list[int]) -> None:
        for choice in choices:
            name = self._pick(choice, list(self.world.workers))
            if name:
                self.world.move(name)

    @rule(choice=SMALL)
    def a_worker_dies(self, choice: int) -> None:
        name = self._pick(choice, [n for n, w in self.world.workers.items() if w.alive])
        if name:
            self.world.kill(name)

    @rule(keep=st.sets(SMALL, max_size=4), new=st.integers(0, 2))
    def a_new_target(self, keep: set[int], new: int) -> None:
        alive = [n for n, v in self.world.state.workers.items() if v.alive and not v.stopping]
        kept = [n for i, n in enumerate(alive) if i in keep]
        if len(kept) + new <= 5:
            self.world.set_target(kept + self.world.new_names(new))

    @rule()
    def time_passes(self) -> None:
        self.world.tick()

    @precondition(lambda self: self.world.kills)
    @rule()
    def the_executor_catches_up(self) -> None:
        self.world.kill(self.world.kills.pop())

    @rule()
    def the_coordinator_dies_and_comes_back(self) -> None:
        self.world.restart_coordinator()

    @rule(rounds=st.integers(1, 6))
    def some_peace(self, rounds: int) -> None:
        self.world.peace(rounds)

    @invariant()
    def never_two_generations_at_once(self) -> None:
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self) -> None:
        """However bad it was: in peace the job reaches its last target and trains."""
        if not hasattr(self, "world"):
            return
        world, state = self.world, self.world.state
        world.peace(60)
        if not state.target and not state.pausing:
            return  # everyone wanted has died; whether someone is left is not the protocol's choice
        assert not state.recovering
        assert state.pending is None, state.pending
        if state.pausing:
            assert state.active is None
            assert not world.training()
            return
        assert state.active is not None
        assert set(state.active.members) == set(state.target)
        assert set(world.training()) == set(state.target)
        before = max(world.applied, default=0)
        world.peace(12)
        assert max(world.applied) > before, "deadlock: the target is reached but no step is done"


Adversary.TestCase.settings = settings(
    max_examples=120,
    stateful_step_count=50,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
TestAdversary = Adversary.TestCase


def trained(size: int) -> World:
    world = World()
    world.set_target(world.new_names(size))
    world.peace(20)
    assert world.state.active is not None
    return world


def test_a_job_starts_grows_shrinks_migrates_pauses_and_resumes():
    world = trained(2)
    for target in (["w0", "w1", *world.new_names(1)], ["w0", "w2"], world.new_names(2)):
        world.set_target(target)
        world.peace(30)
        assert world.state.active.members == tuple(target)
    world.set_target([])
    world.peace(30)
    assert any(isinstance(e, JobPaused) and e.path == "paused" for e in world.events)
    assert not world.training()
    world.set_target(resumed := world.new_names(3))
    world.peace(30)
    assert world.state.active.members == tuple(resumed)


def test_a_newer_target_cancels_a_pending_one_at_once_and_keeps_the_newcomer_wanted_by_both():
    world = trained(1)
    world.set_target(["w0", *world.new_names(2)])
    assert world.state.pending is None  # the newcomers are not ready
    world.move("w1")
    world.set_target(["w0", "w1"])
    assert world.workers["w2"].quitting
    world.peace(20)
    assert world.state.active.members == ("w0", "w1")
    committed = [e for e in world.events if isinstance(e, GenerationCommitted)]
    assert [e.members for e in committed] == [("w0",), ("w0", "w1")]


@pytest.mark.parametrize("rounds", range(14))
@pytest.mark.parametrize("victim", ["w0", "w1", "w2"])
def test_a_worker_dies_at_every_point_of_a_growth(victim: str, rounds: int):
    """Worker after worker, message after message: whoever dies whenever, the rest go on without a lost step."""
    world = trained(2)
    world.set_target(["w0", "w1", *world.new_names(1)])
    for _ in range(rounds):
        for name in list(world.workers):
            if world.workers[name].statuses:
                world.deliver_status(name)
            if world.workers[name].orders:
                world.deliver_order(name)
            world.move(name)
    world.kill(victim)
    world.peace(30)
    rest = {"w0", "w1", "w2"} - {victim}
    assert set(world.state.active.members) == rest
    assert any(isinstance(e, WorkerLost) and e.worker == victim for e in world.events)
    before = max(world.applied)
    world.peace(10)
    assert max(world.applied) > before


def looking_on(world: World) -> World:
    """w2 has joined w0 and w1, and is given the state over many steps."""
    world.set_target(["w0", "w1", *world.new_names(1)])
    while world.workers["w2"].joining is None:
        world.windows.update(dict.fromkeys(range(2, 6), 50))
        world.peace(1)
    world.peace(3)
    assert world.state.learners() == ["w2"]
    return world


def test_the_others_do_steps_while_a_newcomer_is_given_the_state():
    world = looking_on(trained(2))
    before = max(world.applied)
    world.peace(20)
    assert max(world.applied) > before + 3
    assert world.workers["w2"].member.partial
    assert not any(isinstance(e, GenerationCommitted) and "w2" in e.members for e in world.events)
    world.windows.update(dict.fromkeys(range(2, 6), 1))
    world.peace(10)
    assert any(isinstance(e, GenerationCommitted) and "w2" in e.members for e in world.events)


def test_a_newer_target_sends_a_newcomer_away_that_has_only_a_part_of_the_state():
    world = looking_on(trained(2))
    world.set_target(["w0", "w1"])
    assert world.state.pending.plan.learners == ("w2",)
    world.peace(20)
    assert world.state.active.members == ("w0", "w1")
    assert not world.workers["w2"].alive
    assert not any(isinstance(e, WorkerLost) for e in world.events)


def test_no_one_leaves_before_those_who_stay_have_the_whole_state():
    world = looking_on(trained(2))
    world.set_target(["w2"])
    world.peace(20)
    assert world.state.active.members == ("w0", "w1", "w2")
    assert world.state.pending.plan.members == ("w2",)  # prepared, but not committed
    assert not world.state.pending.committed
    world.windows.update(dict.fromkeys(range(2, 6), 1))
    world.peace(20)
    assert world.state.active.members == ("w2",)


@pytest.mark.parametrize("victim", ["w0", "w1", "w2"])
def test_whoever_dies_while_state_is_handed_over_the_rest_reach_the_target(victim: str):
    world = looking_on(trained(2))
    world.kill(victim)
    world.windows.update(dict.fromkeys(range(3, 10), 1))
    world.peace(40)
    rest = {"w0", "w1", "w2"} - {victim}
    assert set(world.state.active.members) == set(world.training()) == rest
    assert [e.worker for e in world.events if isinstance(e, WorkerLost)] == [victim]


def test_a_newcomer_that_fails_while_it_is_given_the_state_does_not_end_the_job():
    world = looking_on(trained(2))
    world.workers["w2"].member.fail("MemoryError: no room")
    world.say("w2")
    world.peace(20)
    assert [e.worker for e in world.events if isinstance(e, WorkerRefused)] == ["w2"]
    assert world.state.outcome is None
    assert world.state.active.members == ("w0", "w1")
    before = max(world.applied)
    world.peace(10)
    assert max(world.applied) > before


def test_a_newcomer_that_fails_after_its_generation_broke_does_not_end_the_job():
    world = looking_on(trained(2))
    world.kill("w1")
    member = world.workers["w2"].member
    for _ in range(40):
        if not member.partial:
            break
        world.peace(1)
    assert (member.phase, member.members) == (Phase.READY, ())
    assert "w2" in world.state.active.members, "the others have not gone on without it yet"
    member.fail("AttributeError: in what was left of its loop's body")
    world.say("w2")
    world.peace(20)
    assert [e.worker for e in world.events if isinstance(e, WorkerRefused)] == ["w2"]
    assert world.state.outcome is None
    assert world.state.active.members == ("w0",)


@pytest.mark.parametrize(("away", "found_after_s"), [(False, 120), (True, 1200)])
def test_who_evaluates_has_more_time_than_who_does_not_arrive_at_a_step(away: bool, found_after_s: float):
    world = trained(2)
    silent = {"heartbeat_timeout_s": 1e9, "away_timeout_s": 1e9}
    world.state.timing = Timing(**silent, hang_s=100, away_s=1000)
    world.workers["w0"].member.away = away
    for _ in range(9):  # w1 goes on alone, to where it must wait
        world.move("w1")
        for name in ("w0", "w1"):
            world.say(name)
            while world.workers[name].statuses:
                world.deliver_status(name)
    assert world.state.workers["w1"].arrived > world.state.workers["w0"].arrived
    world.tick(found_after_s / 2)
    assert not world.kills
    world.tick(found_after_s / 2)
    assert world.kills == ["w0"]


def test_pause_in_the_middle_of_a_transfer_saves_what_the_holders_hold():
    world = looking_on(trained(2))
    world.set_target([])
    world.peace(20)
    assert any(isinstance(e, JobPaused) and e.path == "paused" for e in world.events)
    assert not world.training()


def test_a_job_that_was_resumed_and_loses_all_workers_continues_from_its_pause():
    world = trained(2)
    world.set_target([])
    world.peace(30)
    world.set_target(world.new_names(1))
    world.peace(30)
    world.kill(world.state.active.members[0])
    world.set_target(world.new_names(1))
    seen = set()
    for _ in range(20):
        world.peace(1)
        seen |= {w.member.plan.restore for w in world.workers.values() if w.member.plan}
    assert seen == {"paused"}
    assert world.state.active is not None


def test_a_coordinator_without_memory_believes_its_workers():
    world = trained(3)
    number, members = world.state.active.number, world.state.active.members
    world.state = CoordinatorState("job", timing=world.state.timing)
    for name in members:
        world.connect(name)
    world.peace(3)
    assert world.state.active.number == number
    assert world.state.active.members == members
    world.set_target(["w0", "w2"])
    world.peace(20)
    assert world.state.active.members == ("w0", "w2")
    assert world.state.active.number > number


def broken_while_no_coordinator_ran() -> World:
    """w2 has died, so the steps of w0 and w1 broke. The coordinator is back, and no worker has connected yet."""
    world = trained(3)
    world.workers["w2"].alive = False
    for _ in range(3):
        for name in ("w0", "w1"):
            world.move(name)
    assert [world.workers[name].at for name in ("w0", "w1")] == ["halted", "halted"]
    world.state = CoordinatorState.from_dict(world.state.to_dict(), world.now_s, world.state.timing)
    for worker in world.workers.values():
        worker.orders.clear()
        worker.statuses.clear()
    return world


def first_survivor_reports(world: World) -> None:
    world.connect("w0")
    while world.workers["w0"].statuses:
        world.deliver_status("w0")


def test_a_survivor_that_reports_a_broken_step_after_a_restart_gets_no_healthy_worker_killed():
    world = broken_while_no_coordinator_ran()
    grace_s = world.state.timing.restored_s
    assert grace_s > world.state.timing.reconnect_s
    first_survivor_reports(world)
    world.tick(grace_s - 1.0)
    first_survivor_reports(world)
    assert world.kills == []
    world.connect("w1")
    world.perform(coordinator.exited(world.state, "w2", "killed", world.now_s))
    world.peace(20)
    assert world.state.active.members == ("w0", "w1")
    assert set(world.training()) == {"w0", "w1"}
    assert world.kills == []


def test_a_worker_that_is_not_back_within_the_time_after_a_restart_is_given_up():
    world = broken_while_no_coordinator_ran()
    first_survivor_reports(world)
    world.connect("w1")
    world.tick(world.state.timing.restored_s)
    assert world.kills == []
    world.tick(0.1)
    assert world.kills == ["w2"]
    world.peace(20)
    assert set(world.training()) == {"w0", "w1"}


def test_a_worker_that_came_back_and_is_lost_again_has_the_usual_time():
    world = broken_while_no_coordinator_ran()
    first_survivor_reports(world)
    world.connect("w1")
    world.perform(coordinator.disconnected(world.state, "w1", world.now_s))
    world.tick(0.1)
    assert world.kills == ["w1"]


def test_if_all_die_the_next_workers_start_from_the_checkpoint():
    world = trained(2)
    world.state.checkpoint = "at step 40"
    for name in ("w0", "w1"):
        world.kill(name)
    world.set_target(world.new_names(2))
    seen = set()
    for _ in range(20):
        world.peace(1)
        seen |= {w.member.plan.restore for w in world.workers.values() if w.member.plan}
    assert world.state.active.members == ("w2", "w3")
    assert seen == {"at step 40"}


def test_a_state_saved_by_the_released_version_0_1_is_restored():
    """As it stands in databases: members are called crew, and an unannounced generation untold."""
    saved = {
        "job": "7", "pause_path": "/p", "pausing": False, "recovering": False, "dead": 1, "issued": 3,
        "untold": "switch", "checkpoint": "/c", "checkpoint_step": 9, "checkpoints_asked": 1, "paused": None,
        "outcome": None, "stranded": False, "target": ["w0", "w1", "w2"], "crew": ["w0", "w1"],
        "signature": ["parameter w"], "active": {"number": 2, "members": ["w0", "w1"]},
        "pending": {
            "plan": {
                "number": 3, "kind": "switch", "members": ["w0", "w1", "w2"], "previous": 2,
                "holders": ["w0", "w1"], "addresses": {"w2": "h:1"}, "resume": 0, "restore": None, "save": None,
                "learners": [], "replaces": {},
            },
            "committed": True,
        },
        "workers": {
            "w0": {"alive": True, "stopping": False, "why": "no longer wanted", "announced": True, "met": True}
        },
    }  # fmt: skip
    state = CoordinatorState.from_dict(saved, now_s=5.0)
    assert (state.participants, state.unannounced) == (("w0", "w1"), Kind.SWITCH)
    assert state.pending.plan.newcomers == ("w2",)
    assert (state.workers["w0"].announced, state.workers["w0"].back_by_s) == (True, 35.0)
    assert CoordinatorState.from_dict(state.to_dict(), now_s=5.0) == state


def test_a_script_that_ends_before_it_joins_fails_with_its_own_error_first():
    state = CoordinatorState("job")
    coordinator.set_target(state, ["w0"], 0.0)
    effects = coordinator.exited(state, "w0", "ended with exit code 1: ValueError: no DeepSpeed", 1.0)
    (failed,) = [e.event for e in effects if isinstance(e, Emit) and isinstance(e.event, JobFailed)]
    assert failed.why.startswith("ended with exit code 1: ValueError: no DeepSpeed (")
    assert "a command that never calls it needs a fixed number of GPUs" in failed.why


def break_step(world: World) -> None:
    """A collective fails in all members, though all of them live. They form the next generation."""
    for name in world.state.active.members:
        world._halt(world.workers[name], holds=False)
        world.say(name)
    for _ in range(20):
        world.peace(1)
        if all(world.workers[name].member.phase is Phase.ACTIVE for name in world.state.active.members):
            return
    raise AssertionError("no generation follows")


def test_a_step_that_breaks_again_and_again_without_a_lost_worker_fails_the_job():
    world = trained(2)
    break_step(world)
    break_step(world)
    with pytest.raises(AssertionError, match="broke 3 times, though no worker was lost"):
        break_step(world)
    assert world.state.outcome == "failed"


def test_steps_that_break_now_and_then_do_not_fail_the_job():
    world = trained(3)
    for _ in range(5):
        break_step(world)
        world.peace(10)
    break_step(world)
    break_step(world)
    world.kill("w2")  # the reason is found
    world.peace(4)
    break_step(world)
    break_step(world)
    before = max(world.applied)
    world.peace(10)
    assert max(world.applied) > before
