"""Shard groups in the protocol: members join, leave and are lost in whole groups."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from protocol_world import World
from test_protocol import Adversary

from shoal.wire.events import GenerationCommitted, WorkerLost
from shoal.wire.groups import group_line, group_size, groups_of, regrouped, unbroken, whole

sizes = st.integers(1, 4)


def test_the_size_of_the_groups_is_part_of_the_signature():
    assert group_size(("parameter w float32 [2]", group_line(3))) == 3
    assert group_size(("parameter w float32 [2]",)) == 1
    assert group_size(None) == 1
    assert group_size(("shard groups of many workers",)) == 1


@given(sizes, st.integers(0, 5), st.sets(st.integers(0, 19)))
def test_who_remains_forms_whole_groups_and_keeps_its_shard_where_it_can(
    size: int, count: int, kept: set[int]
):
    members = [f"w{i}" for i in range(size * count)]
    remaining = [w for i, w in enumerate(members) if i in kept]
    found = regrouped(members, remaining, size)
    assert len(found) == len(remaining) // size * size
    assert len(set(found)) == len(found)
    assert set(found) <= set(remaining)
    for group in groups_of(members, size):
        if set(group) <= set(remaining):
            assert group in groups_of(found, size), "a whole group was taken apart"
    before = {w: i % size for i, w in enumerate(members)}
    moved = sum(before[w] != i % size for i, w in enumerate(found))
    left = [sum(before[w] == shard for w in found) for shard in range(size)]
    assert moved == sum(max(0, n - len(found) // size) for n in left), (
        "more workers than necessary change their shard"
    )


@given(sizes, st.integers(1, 5), st.sets(st.integers(0, 19), min_size=1))
def test_survivors_go_on_in_groups_that_lost_nobody(size: int, count: int, lost: set[int]):
    members = tuple(f"w{i}" for i in range(size * count))
    alive = {w: members for i, w in enumerate(members) if i not in lost}
    found = unbroken(alive, size)
    want = [g for g in groups_of(members, size) if all(w in alive for w in g)]
    assert groups_of(found, size) == want
    assert whole(found, size) == found


def trained(size: int, group: int = 2) -> World:
    world = World(group=group)
    world.set_target(world.new_names(size))
    world.peace(20)
    assert world.state.active is not None
    return world


def test_a_group_joins_when_all_its_workers_are_there():
    world = trained(2)
    world.set_target(["w0", "w1", *world.new_names(1)])
    world.peace(20)
    assert world.state.active.members == ("w0", "w1")
    world.set_target(["w0", "w1", "w2", *world.new_names(1)])
    world.peace(20)
    assert world.state.active.members == ("w0", "w1", "w2", "w3")


@pytest.mark.parametrize("rounds", range(0, 14, 2))
@pytest.mark.parametrize("victim", ["w0", "w3", "w4"])
def test_a_worker_dies_at_every_point_of_a_growth(victim: str, rounds: int):
    """Its group is lost with it, or does not join. The others go on without a lost step."""
    world = trained(4)
    world.set_target(["w0", "w1", "w2", "w3", *world.new_names(2)])
    for _ in range(rounds):
        for name in list(world.workers):
            if world.workers[name].statuses:
                world.deliver_status(name)
            if world.workers[name].orders:
                world.deliver_order(name)
            world.move(name)
    world.kill(victim)
    world.peace(40)
    members = world.state.active.members
    assert victim not in members
    assert len(members) % 2 == 0
    assert len(members) >= 2
    lost = {e.worker for e in world.events if isinstance(e, WorkerLost)}
    assert victim in lost
    before = max(world.applied)
    world.peace(10)
    assert max(world.applied) > before


class GroupAdversary(Adversary):
    """The same adversary against a job with groups of two workers."""

    group = 2

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        world, state = self.world, self.world.state
        world.peace(60)
        committed = [e.members for e in world.events if isinstance(e, GenerationCommitted)]
        assert all(len(members) % 2 == 0 for members in committed), "a generation with a part of a group"
        if (
            state.pausing
            or not whole(state.target, 2)
            or not set(state.active.members if state.active else ())
        ):
            return
        assert not state.recovering
        before = max(world.applied, default=0)
        world.peace(12)
        assert max(world.applied) > before, "deadlock: no step is done"


GroupAdversary.TestCase.settings = settings(Adversary.TestCase.settings, max_examples=25)
TestGroupAdversary = GroupAdversary.TestCase
del Adversary
