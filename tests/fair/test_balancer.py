"""Balancing ticket load per GPU over the nodes, and idle GPUs that attract waiting jobs."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.policies.gandiva_fair.balancer import attract, balance, ticket_load, time_needed


def setting(tickets, size, home, gpus, types=None):
    return {
        "tickets": np.array(tickets, float),
        "size": np.array(size, np.int32),
        "home": np.array(home, np.int32),
        "gpus_of_node": np.array(gpus, np.int32),
        "type_of_node": np.array(types or [0] * len(gpus), np.int32),
        "movable": np.ones(len(tickets), bool),
        "active": np.ones(len(tickets), bool),
        "spanning": np.zeros(len(gpus)),
    }


def loads(s):
    return ticket_load(s["tickets"], s["home"], s["gpus_of_node"], s["active"], s["spanning"]).tolist()


def test_the_worked_example_takes_one_move_and_then_no_other_helps():
    s = setting([1.5, 1.5, 2, 1.5, 1.5], [2] * 5, [0, 0, 0, 1, 1], [4, 4])
    assert loads(s) == [1.25, 0.75]
    assert list(balance(**s, most_moves=10, min_gain=0.01)) == [(0, 1)]
    assert loads(s) == [0.875, 1.125]


def test_a_job_that_moved_a_short_while_ago_rests():
    s = setting([1.5, 1.5, 2, 1.5, 1.5], [2] * 5, [0, 0, 0, 1, 1], [4, 4])
    s["movable"][0] = False
    assert list(balance(**s, most_moves=10, min_gain=0.01)) == [(1, 1)]


def test_a_gain_below_the_minimum_moves_nothing():
    s = setting([1.5, 1.5, 2, 1.5, 1.5], [2] * 5, [0, 0, 0, 1, 1], [4, 4])
    assert not list(balance(**s, most_moves=10, min_gain=0.3))


def test_nodes_that_carry_a_gang_over_several_nodes_count_its_tickets():
    s = setting([1.0, 1.0], [1, 1], [0, 0], [4, 4])
    s["spanning"][:] = [0.0, 4.0]
    assert not list(balance(**s, most_moves=10, min_gain=0.01))


def test_jobs_do_not_leave_their_gpu_type_to_balance():
    s = setting([1.0] * 6, [1] * 6, [0] * 6, [4, 4], [0, 1])
    assert not list(balance(**s, most_moves=10, min_gain=0.01))


def test_where_the_most_loaded_node_cannot_give_the_next_one_does():
    # Node 0 holds one heavy job that would only carry its load along; node 1 can give a light one to node 2.
    s = setting([8.0, 2, 2, 0], [4, 1, 1, 1], [0, 1, 1, 2], [4, 4, 4])
    assert next(iter(balance(**s, most_moves=5, min_gain=0.01))) in [(1, 2), (2, 2)]


def needs(s):
    return [
        time_needed(np.flatnonzero(s["home"] == n), s["tickets"], s["size"], int(g), 0.0, -1, -1)
        for n, g in enumerate(s["gpus_of_node"])
    ]


def test_a_gang_as_large_as_the_node_leaves_the_node_of_a_job_that_is_due_all_of_the_time():
    # By ticket load the gang should stay, but its node can only serve it by stopping the small job.
    s = setting([1.0, 1.0, 2.0, 0.2], [1, 4, 4, 1], [0, 0, 1, 1], [4, 4])
    assert loads(s) == pytest.approx([0.5, 0.55])
    assert needs(s) == pytest.approx([1.25, 0.7])
    assert list(balance(**s, most_moves=1, min_gain=0.05)) == [(1, 1)]
    assert needs(s) == pytest.approx([0.25, 0.95])


def test_two_jobs_change_places_where_no_single_move_helps():
    # A gang that is due a quarter of the time shares its node with a small job that is due all of it. On the
    # other node another small job is in its way; they change places, and then the small jobs run together.
    s = setting([1.0, 1.0, 2.4, 0.6], [1, 4, 4, 1], [0, 0, 1, 1], [4, 4])
    assert needs(s) == pytest.approx([1.25, 1.2])
    assert len(balance(**s, most_moves=2, min_gain=0.05)) == 2
    assert s["home"][0] == s["home"][3] != s["home"][1] == s["home"][2]
    assert sorted(needs(s)) == pytest.approx([0.4, 0.85])
    s = setting([1.0, 1.0, 2.4, 0.6], [1, 4, 4, 1], [0, 0, 1, 1], [4, 4])
    assert not list(balance(**s, most_moves=1, min_gain=0.05))


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(0, 4)), min_size=1, max_size=25),
    st.integers(0, 6),
)
def test_moves_stay_within_the_bound_and_never_raise_what_the_busiest_node_needs(jobs, most):
    size = [s for s, _ in jobs]
    s = setting([x / 2 for x in size], size, [n for _, n in jobs], [4] * 5)
    before, load = needs(s), loads(s)
    moves = list(balance(**s, most_moves=most, min_gain=0.05))
    assert len(moves) <= most
    assert max(needs(s)) <= max(before) + 1e-12
    assert all(n >= x - 1e-12 for n, x in zip(needs(s), loads(s)))
    assert sum(loads(s)) == pytest.approx(sum(load))


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0.05, 1.0), st.integers(0, 4)), min_size=1, max_size=25), st.integers(0, 6)
)
def test_where_no_gang_excludes_another_moves_never_widen_the_spread_of_ticket_load(jobs, most):
    s = setting([t for t, _ in jobs], [1] * len(jobs), [n for _, n in jobs], [30] * 5)
    before = loads(s)
    moves = list(balance(**s, most_moves=most, min_gain=0.0))
    assert len(moves) <= most
    assert max(loads(s)) - min(loads(s)) <= max(before) - min(before) + 1e-12
    assert sum(loads(s)) == pytest.approx(sum(before))


def test_idle_gpus_attract_waiting_jobs_to_the_type_where_they_are_fastest():
    home = np.array([0, 0, 0], np.int32)
    free = np.array([0, 2, 4], np.int32)
    moves = attract(
        np.array([2, 1, 0], np.int32),
        np.array([4, 1, 2], np.int32),
        np.array([False, True, True]),
        np.array([[1.0, 1.0, 1.0], [2.0, 0.0, 3.0]]),
        np.array([0, 0, 1], np.int32),
        free,
        home,
    )
    assert list(moves) == [(2, 2), (1, 1)]  # job 1 may not use type 1
    assert free.tolist() == [0, 1, 2]
    assert home.tolist() == [0, 1, 2]


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(0, 8), min_size=1, max_size=6),
    st.lists(st.integers(1, 8), min_size=1, max_size=12),
)
def test_after_attraction_no_gpu_idles_while_a_waiting_gang_fits(free, sizes):
    free, size = np.array(free, np.int32), np.array(sizes, np.int32)
    waiting = np.ones(len(size), bool)
    home = np.full(len(size), -1, np.int32)
    speed = np.ones((1, len(size)))
    moves = attract(
        np.arange(len(size), dtype=np.int32), size, waiting, speed, np.zeros(len(free), np.int32), free, home
    )
    for row, _ in moves:
        waiting[row] = False
    assert (free >= 0).all()
    assert not waiting.any() or size[waiting].min() > free.max()
