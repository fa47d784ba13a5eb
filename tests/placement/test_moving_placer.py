"""Moves happen where they pay within the horizon, and only there."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from shoal.core.cluster import Cluster
from shoal.placement.fragmentation import free_gpus
from shoal.placement.keep_and_pack import KeepAndPack
from shoal.placement.moving_placer import MoveRule, MovingPlacer, find_moves, gain_s

from .cases import Bench

CLUSTER = Cluster.of(3, 4)
RULE = MoveRule(move_s=30, horizon_s=600)


def speed(job_id: int, gpu_type: str, placement, servers: int = 0) -> float:
    """Each node more takes a fifth of the speed."""
    return sum(g for _, g in placement) * 0.8 ** (len(placement) - 1)


def moves(current, left=None, rule=RULE, speed=speed):
    return find_moves(CLUSTER, CLUSTER.gpus_of_node, current, left or {}, speed, rule)


@pytest.mark.parametrize(
    ("now", "there", "left", "gain"),
    [
        (1.0, 2.0, 1e9, 2 * 570 - 600),  # the horizon counts
        (1.0, 2.0, 100.0, 2 * 70 - 100),  # the job ends before it
        (1.0, 2.0, 40.0, 2 * 10 - 40),  # too late: a loss
        (1.0, 2.0, 20.0, -20.0),  # it would have ended during the move
        (1.0, 2.0, float("nan"), 2 * 570 - 600),  # length unknown: the horizon
        (1.0, 1.0, 1e9, -30.0),  # no faster: the move is lost
    ],
)
def test_the_gain_is_counted_in_seconds_of_progress_up_to_the_horizon_or_the_end(now, there, left, gain):
    assert gain_s(now, there, left, RULE) == pytest.approx(gain)


def test_a_speed_that_is_not_known_never_moves_a_job():
    assert gain_s(0.0, 2.0, 100, RULE) == -np.inf
    assert gain_s(1.0, float("nan"), 100, RULE) == -np.inf


def test_a_spread_job_moves_onto_one_node_that_has_room():
    (move,) = moves({0: ((0, 2), (1, 2)), 1: ((0, 2),)})
    assert move.placements == {0: ((1, 4),)}
    assert move.gain_s == pytest.approx(1.25 * 570 - 600)


def test_nothing_moves_that_ends_soon_gains_little_or_is_packed():
    spread = {0: ((0, 2), (1, 2))}
    assert moves(spread, left={0: 3.2 * 100}) == []
    assert moves(spread, speed=lambda j, t, p: 1 - 0.01 * len(p)) == []
    assert moves({0: ((0, 4),), 1: ((1, 4), (2, 4))}) == []
    assert moves(spread, rule=MoveRule(move_s=300, horizon_s=600)) == []


def test_a_small_job_makes_room_where_the_large_one_gains_more_than_it_loses():
    current = {0: ((0, 3), (1, 1)), 1: ((0, 1),), 2: ((1, 2),), 3: ((2, 2),)}
    (move,) = moves(current)
    assert move.placements == {0: ((0, 4),), 1: ((1, 1),)}
    assert move.gain_s == pytest.approx(1.25 * 570 - 600 - 30)


def test_not_more_jobs_move_at_a_time_than_the_rule_allows():
    current = dict.fromkeys(range(4), ((0, 1), (1, 1)))
    assert sum(len(m.placements) for m in moves(current, rule=MoveRule(30, 600, max_moves=2))) <= 2


@given(seed=st.integers(0, 100_000))
@settings(max_examples=100, deadline=None)
def test_moves_keep_every_share_and_overcommit_nothing(seed):
    rng = np.random.default_rng(seed)
    free, current = CLUSTER.gpus_of_node.copy(), {}
    for job_id in range(5):
        where = {}
        for node in rng.choice(3, 2, replace=False).tolist():
            take = int(rng.integers(0, free[node] + 1))
            if take:
                where[node] = take
                free[node] -= take
        if where:
            current[job_id] = tuple(sorted(where.items()))
    found = moves(current, rule=MoveRule(10, 3600))
    after = current | {j: p for m in found for j, p in m.placements.items()}
    assert (free_gpus(CLUSTER.gpus_of_node, after.values()) >= 0).all()
    for job_id, placement in current.items():
        assert sum(g for _, g in after[job_id]) == sum(g for _, g in placement)
    assert all(m.gain_s > 0 for m in found)
    spread = sum(len(p) for p in after.values())
    assert spread < sum(len(p) for p in current.values()) or not found


def test_the_moving_placer_moves_what_the_packing_one_keeps():
    b = Bench(CLUSTER, MovingPlacer(KeepAndPack(), speed, RULE))
    for job_id in range(3):
        b.add(job_id)
        b.view.remaining[b.view.row(job_id)] = 1e9
    b.place({0: 2, 1: 4, 2: 4}, given={0: ((0, 2),), 1: ((0, 2), (1, 2)), 2: ((2, 4),)})
    assert b.place({}).placements == {1: ((1, 4),)}
    assert b.used().tolist() == [2, 4, 4]
    assert b.place({}).placements == {}, "and then it rests"


def test_who_cannot_move_is_neither_moved_nor_pushed_aside():
    """Job 0 spans two nodes; one of the others stands in its way on each node, and could go elsewhere."""
    for fixed, moved in ((set(), True), ({0}, False), ({1, 2, 3}, False)):
        b = Bench(CLUSTER, MovingPlacer(KeepAndPack(), speed, RULE, lambda job_id, f=fixed: job_id not in f))
        for job_id in range(4):
            b.add(job_id)
            b.view.remaining[b.view.row(job_id)] = 1e9
        given = {0: ((0, 2), (1, 2)), 1: ((0, 1),), 2: ((1, 1),), 3: ((2, 3),)}
        b.place({0: 4, 1: 1, 2: 1, 3: 3}, given=given)
        assert bool(b.place({}).placements) is moved, fixed
