"""Optimus placement: its principle against brute force, its steps by hand, and what must always hold."""

from __future__ import annotations

import itertools

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from shoal.core.errors import ShoalError
from shoal.placement.task_placement import place

ONE = np.array([[1.0]])


def place_one(free: list[float], ps: int, workers: int, **kw):
    return place(np.array(free)[:, None], np.array([ps]), np.array([workers]), ONE, ONE, **kw)


def exchange_time(rows: list[tuple[int, int, int]]) -> int:
    """Slowest container of a step, in parameter pieces: a server sends to the workers elsewhere, a worker
    receives from the servers elsewhere, each over its own share of the network."""
    p, w = sum(r[1] for r in rows), sum(r[2] for r in rows)
    return max(max(w - wn if pn else 0, p - pn if wn else 0) for _, pn, wn in rows)


def every_placement(ps: int, workers: int, nodes: int, room: int):
    def splits(tasks):
        return (c for c in itertools.product(range(tasks + 1), repeat=nodes) if sum(c) == tasks)

    for p in splits(ps):
        for w in splits(workers):
            if all(a + b <= room for a, b in zip(p, w)):
                yield [(n, a, b) for n, (a, b) in enumerate(zip(p, w)) if a + b]


@pytest.mark.parametrize(
    ("ps", "workers", "nodes", "room"),
    [
        (1, 1, 3, 4), (2, 2, 3, 4), (2, 2, 3, 3), (2, 2, 2, 2), (2, 4, 3, 3), (2, 4, 2, 3),
        (4, 2, 3, 3), (3, 3, 3, 2), (4, 4, 4, 2), (4, 4, 2, 4), (2, 6, 2, 4), (3, 3, 4, 2), (3, 6, 3, 3),
    ],
)  # fmt: skip
def test_the_fewest_nodes_with_equal_numbers_are_as_fast_as_any_placement(ps, workers, nodes, room):
    """On equal nodes, where the tasks can be dealt equally, no placement exchanges parameters faster."""
    rows = place_one([room] * nodes, ps, workers).of(0)
    assert len({(p, w) for _, p, w in rows}) == 1, "the same numbers on each"
    assert len(rows) == -(-(ps + workers) // room) or (ps % len(rows) == workers % len(rows) == 0)
    best = min(exchange_time(r) for r in every_placement(ps, workers, nodes, room))
    assert exchange_time(rows) == best


def test_where_tasks_cannot_be_dealt_equally_the_rule_is_within_twice_the_best():
    worst = 0.0
    for ps, workers, room in itertools.product(range(1, 5), range(1, 5), (2, 3, 4)):
        nodes = 4
        if ps + workers > nodes * room:
            continue
        rows = place_one([room] * nodes, ps, workers).of(0)
        best = min(exchange_time(r) for r in every_placement(ps, workers, nodes, room))
        if best:
            worst = max(worst, exchange_time(rows) / best)
    assert 1.0 < worst <= 2.0


def test_the_freest_nodes_are_taken_and_tasks_are_dealt_in_turn():
    assert place_one([2, 4, 3], 2, 2).of(0) == [(1, 2, 2)]
    assert place_one([2, 3, 3], 2, 2).of(0) == [(1, 1, 1), (2, 1, 1)]
    assert place_one([3, 3, 3], 2, 3).of(0) == [(0, 1, 2), (1, 1, 1)]


def test_small_jobs_come_first():
    free = np.array([[4.0]])
    both = place(free, np.array([2, 1]), np.array([2, 1]), np.ones((2, 1)), np.ones((2, 1)))
    assert both.of(1) == [(0, 1, 1)]
    assert both.placed_ps.tolist() == [1, 1]
    assert both.placed_workers.tolist() == [1, 1], "the larger one goes on smaller, in what is left"


def test_a_job_that_cannot_be_dealt_goes_on_smaller_or_waits():
    smaller = place_one([3], 2, 2)
    assert smaller.of(0) == [(0, 2, 1)]
    waits = place_one([1], 1, 1)
    assert waits.of(0) == []
    assert (waits.placed_ps.tolist(), waits.placed_workers.tolist()) == ([0], [0])


def test_what_is_undone_is_free_again():
    # The first job needs a worker that fits nowhere; its server must not stay behind.
    needs_ps = np.array([[1.0, 0.0], [2.0, 0.0]])
    needs_w = np.array([[0.0, 9.0], [0.0, 1.0]])
    result = place(np.array([[2.0, 1.0]]), np.array([1, 1]), np.array([1, 2]), needs_ps, needs_w)
    assert result.placed_ps.tolist() == [0, 1]


def test_least_loaded_spreads_and_round_robin_goes_in_a_circle():
    assert place_one([4, 4, 4], 1, 2, rule="least-loaded").of(0) == [(0, 1, 0), (1, 0, 1), (2, 0, 1)]
    two = place(
        np.full((3, 1), 4.0), np.array([1, 1]), np.array([1, 1]), np.ones((2, 1)), np.ones((2, 1)),
        rule="round-robin",
    )  # fmt: skip
    assert sorted(two.of(0)) == [(0, 1, 0), (1, 0, 1)]
    assert sorted(two.of(1)) == [(0, 0, 1), (2, 1, 0)]


@st.composite
def clusters(draw):
    jobs = draw(st.integers(1, 6))
    counts = st.lists(st.integers(1, 5), min_size=jobs, max_size=jobs)
    needs = st.lists(st.tuples(st.integers(1, 3), st.integers(0, 2)), min_size=jobs, max_size=jobs)
    free = draw(st.lists(st.tuples(st.integers(0, 8), st.integers(0, 4)), min_size=1, max_size=6))
    return (
        np.array(free, float), np.array(draw(counts)), np.array(draw(counts)),
        np.array(draw(needs), float), np.array(draw(needs), float),
    )  # fmt: skip


@given(case=clusters(), rule=st.sampled_from(["optimus", "least-loaded", "round-robin"]))
@settings(max_examples=200, deadline=None)
def test_no_node_is_overcommitted_and_no_job_has_half_of_what_it_needs_to_run(case, rule):
    free, ps, workers, ps_needs, worker_needs = case
    result = place(*case, rule=rule)
    used = np.zeros_like(free)
    for job, node, p, w in zip(result.job, result.node, result.ps, result.workers):
        used[node] += p * ps_needs[job] + w * worker_needs[job]
    assert (used <= free + 1e-9).all()
    assert (result.placed_ps <= ps).all()
    assert (result.placed_workers <= workers).all()
    assert ((result.placed_ps > 0) == (result.placed_workers > 0)).all()


@given(case=clusters())
@settings(max_examples=150, deadline=None)
def test_the_kernel_equals_the_algorithm_written_plainly(case):
    result = place(*case)
    expected = reference(*case)
    for job in range(len(case[1])):
        assert result.of(job) == expected[job]


def reference(free, ps, workers, ps_needs, worker_needs):
    free = free.copy()
    placed: list[list[tuple[int, int, int]]] = [[] for _ in ps]
    for job in sorted(range(len(ps)), key=lambda j: (ps[j] + workers[j], j)):
        p, w, ps_need, worker_need = int(ps[job]), int(workers[job]), ps_needs[job], worker_needs[job]
        for k in range(1, min(max(p, w), len(free)) + 1):
            nodes = sorted(range(len(free)), key=lambda n: (-free[n, 0], n))[:k]
            dealt = [(n, len(range(i, p, k)), len(range(i, w, k))) for i, n in enumerate(nodes)]
            if all((a * ps_need + b * worker_need <= free[n] + 1e-9).all() for n, a, b in dealt):
                break
        else:
            dealt = first_fit(free.copy(), p, w, ps_need, worker_need)
        for n, a, b in dealt:
            free[n] -= a * ps_need + b * worker_need
        placed[job] = sorted(dealt)
    return placed


def first_fit(free, p, w, ps_need, worker_need):
    counts: dict[int, list[int]] = {}
    for turn in range(2 * max(p, w)):
        kind, need = turn % 2, (ps_need, worker_need)[turn % 2]
        if sum(c[kind] for c in counts.values()) == (p, w)[kind]:
            continue
        node = next((n for n in range(len(free)) if (need <= free[n] + 1e-9).all()), None)
        if node is None:
            break
        free[node] -= need
        counts.setdefault(node, [0, 0])[kind] += 1
    if any(sum(c[kind] for c in counts.values()) == 0 for kind in (0, 1)):
        return []
    return [(n, a, b) for n, (a, b) in counts.items()]


@pytest.mark.parametrize(
    ("kw", "message"),
    [
        ({"rule": "best"}, "known: optimus"),
        ({"ps": 0}, "at least one parameter server"),
        ({"free": [np.nan]}, "finite"),
    ],
)
def test_impossible_input_is_refused(kw, message):
    with pytest.raises(ShoalError, match=message):
        place_one(kw.get("free", [4]), kw.get("ps", 1), 1, rule=kw.get("rule", "optimus"))
