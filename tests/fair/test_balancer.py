"""Balancing the ticket load per GPU over the nodes, and idle GPUs for waiting jobs."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.policies.gandiva_fair.balancer import balance, ticket_load
from shoal.policies.gandiva_fair.quantum import fill_idle
from shoal.policies.gandiva_fair.tables import SPANS, Jobs, Nodes


def setting(tickets, size, home, gpus, types=None):
    return {
        "jobs": Jobs(np.array(size, np.int32), np.array(home, np.int32), np.array(tickets, float)),
        "nodes": Nodes(np.array(gpus, np.int32), np.array(types or [0] * len(gpus), np.int32)),
        "movable": np.ones(len(tickets), bool),
        "spanning": np.zeros(len(gpus)),
    }


def loads(s):
    return ticket_load(s["jobs"], s["nodes"], s["spanning"]).tolist()


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


def test_waiting_jobs_move_to_idle_gpus_of_the_type_where_they_are_fastest():
    free = np.array([0, 2, 4], np.int32)
    moves = fill_idle(
        np.array([2, 1, 0]),
        np.array([False, True, True]),
        np.array([[1.0, 1.0, 1.0], [2.0, 0.0, 3.0]]),
        Jobs(np.array([4, 1, 2], np.int32), np.zeros(3, np.int32), np.ones(3)),
        Nodes(np.array([4, 4, 4], np.int32), np.array([0, 0, 1], np.int32)),
        free,
    )
    assert list(moves) == [(2, 2, 2), (1, 1, 1)]  # job 1 may not use type 1
    assert free.tolist() == [0, 1, 2]


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(0, 8), min_size=1, max_size=6),
    st.lists(st.integers(1, 16), min_size=1, max_size=12),
)
def test_no_gpu_is_idle_while_a_waiting_gang_fits(free, sizes):
    free, size = np.array(free, np.int32), np.array(sizes, np.int32)
    home = np.where(size > 8, SPANS, 0).astype(np.int32)
    moves = fill_idle(
        np.arange(len(size)),
        np.ones(len(size), bool),
        np.ones((1, len(size))),
        Jobs(size, home, np.ones(len(size))),
        Nodes(np.full(len(free), 8, np.int32), np.zeros(len(free), np.int32)),
        free,
    )
    waiting = np.ones(len(size), bool)
    for row, _, _ in moves:
        waiting[row] = False
    assert (free >= 0).all()
    assert not (waiting & (size <= np.where(home == 0, free.max(), free.sum()))).any()
