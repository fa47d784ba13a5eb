"""Relief where stride alone leaves users behind: sets chosen as a whole, and other nodes for those who wait."""

from itertools import combinations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.policies.gandiva_fair.kernels import SPANS
from shoal.policies.gandiva_fair.relief import FIRST, best_set, choose_sets, put_first, take_in

JOBS = st.lists(st.tuples(st.integers(1, 4), st.integers(-50, 50)), min_size=1, max_size=8)


def rows_of(jobs):
    size = np.array([s for s, _ in jobs], np.int32)
    passed = np.array([float(p) for _, p in jobs])
    return size, passed, np.argsort(passed, kind="stable")


@settings(max_examples=200, deadline=None)
@given(JOBS, st.integers(0, 8))
def test_the_best_set_is_that_of_trying_all(jobs, room):
    size, passed, rows = rows_of(jobs)
    chosen = rows[best_set(rows, passed, size, room)]
    every = [
        -(size[list(c)] * passed[list(c)]).sum()
        for n in range(len(jobs) + 1)
        for c in combinations(range(len(jobs)), n)
        if size[list(c)].sum() <= room
    ]
    assert size[chosen].sum() <= room
    assert -(size[chosen] * passed[chosen]).sum() == max(every)


def on_one_node(order, passed, size, behind, runs, free):
    none, home = np.zeros(0, np.int32), np.zeros(len(size), np.int32)
    gpus, start = np.array([4], np.int32), np.zeros(1, np.int32)
    choose_sets(
        order, passed, size, home, start, none, none, gpus, np.ones(len(size), bool), behind, runs, free
    )


def test_a_gang_runs_instead_of_its_users_small_job_and_those_of_users_who_are_ahead():
    # One by one, the small job of the user that is behind goes first and those ahead fill up beside it.
    size, passed, order = rows_of([(1, -31), (4, -30), (2, 90), (1, 95)])
    runs, free = np.array([True, False, True, True]), np.array([0], np.int32)
    behind = np.array([True, True, False, False])
    on_one_node(order, passed, size, behind, runs, free)
    assert runs.tolist() == [False, True, False, False]
    assert free.tolist() == [0]


def test_a_node_where_nobody_waits_who_is_behind_is_left_as_it_is():
    size, passed, order = rows_of([(1, -31), (4, -30), (2, 90), (1, 95)])
    runs, free = np.array([True, False, True, True]), np.array([0], np.int32)
    on_one_node(order, passed, size, runs.copy(), runs, free)
    assert runs.tolist() == [True, False, True, True]


def moved(jobs, home, runs, gpus, most=8):
    size, passed, order = rows_of(jobs)
    home, runs = np.array(home, np.int32), np.array(runs)
    free = np.array([g - size[runs & (home == s)].sum() for s, g in enumerate(gpus)], np.int32)
    gpus, one = np.array(gpus, np.int32), np.zeros(len(gpus), np.int32)
    all_rows, types = np.ones(len(jobs), bool), np.zeros(len(jobs), np.int32)
    moves = take_in(order, passed, size, home, types, one, gpus, all_rows, ~runs, most, runs, free)
    for s, g in enumerate(gpus):
        assert free[s] == g - size[runs & (home == s)].sum() >= 0
    return list(moves), runs.tolist()


def test_a_waiting_job_goes_where_it_pushes_out_those_who_need_it_least():
    jobs = [(2, -40), (4, -50), (2, -45), (2, 10), (2, 5), (2, 30)]
    moves, runs = moved(jobs, [0, 0, 1, 1, 2, 2], [False, True, True, True, True, True], [4, 4, 4])
    assert moves == [(0, 2)]
    assert runs == [True, True, True, True, True, False]


def test_nobody_is_moved_to_push_out_who_is_further_behind():
    assert moved([(2, -40), (4, -50), (4, -60)], [0, 0, 1], [False, True, True], [4, 4])[0] == []


def test_the_bound_on_moves_holds():
    jobs = [(1, -40), (1, -41), (4, -50), (4, 10), (4, 20)]
    assert len(moved(jobs, [0, 0, 0, 1, 2], [False, False, True, True, True], [4] * 3)[0]) == 2
    assert len(moved(jobs, [0, 0, 0, 1, 2], [False, False, True, True, True], [4] * 3, most=1)[0]) == 1


def test_who_waited_beyond_its_patience_goes_before_all_and_the_longest_wait_first():
    passed = np.array([-100.0, 50.0, 60.0, 70.0])
    put_first(passed, np.array([0.0, 8.5, 9.0, 7.9]), 8.0)
    assert np.argsort(passed).tolist() == [2, 1, 0, 3]
    assert (passed < FIRST).tolist() == [False, True, True, False]


def spanning(passed):
    """Two nodes of 4: a gang of 8 over both, and on each node a job of 4; nobody runs yet."""
    size, passed = np.array([8, 4, 4], np.int32), np.array(passed)
    home = np.array([SPANS, 0, 1], np.int32)
    start, node, gpus = np.array([0, 2], np.int32), np.array([0, 1], np.int32), np.array([4, 4], np.int32)
    runs, free = np.zeros(3, bool), np.array([4, 4], np.int32)
    every = np.ones(3, bool)
    order = np.argsort(passed, kind="stable")
    choose_sets(order, passed, size, home, start, node, gpus, gpus, every, every, runs, free)
    assert free.tolist() == [0, 0]
    return runs.tolist()


def test_a_gang_that_spans_nodes_runs_where_it_is_worth_more_than_those_it_keeps_out():
    assert spanning([-30.0, -40.0, -10.0]) == [True, False, False]
    assert spanning([-30.0, -40.0, -25.0]) == [False, True, True]
