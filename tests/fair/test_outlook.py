"""Sets that leave no GPU idle which another could use, and what becomes of users if nodes run them."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.policies.fair import outlook as ahead
from shoal.policies.fair.outlook import Scene, better_places, outlook
from shoal.policies.fair.sets import by_size, full_set, worth_by_room

JOBS = st.lists(st.tuples(st.integers(1, 5), st.integers(-9, 9)), min_size=1, max_size=8)


def full_sets(sizes, room):
    """All sets of jobs that fit in `room` and leave room for no other, by trying all."""
    rows = range(len(sizes))
    for n in range(len(sizes) + 1):
        for chosen in combinations(rows, n):
            left = room - sum(sizes[i] for i in chosen)
            if left >= 0 and all(sizes[i] > left for i in rows if i not in chosen):
                yield chosen


@settings(max_examples=300, deadline=None)
@given(JOBS, st.integers(0, 8))
def test_the_full_set_of_most_worth_is_that_of_trying_all(jobs, room):
    size, worth = np.array([s for s, _ in jobs], np.int32), np.array([float(w) for _, w in jobs])
    rows, n = np.arange(len(jobs)), len(jobs)
    by_size(rows, n, size)
    assert (np.diff(size[rows]) <= 0).all()
    table, chosen, by_room = np.empty((n + 1, room + 1)), np.zeros(n, bool), np.empty(room + 1)
    left = full_set(rows, n, worth, size, room, table, chosen)
    taken = rows[chosen]
    assert left == room - size[taken].sum() >= 0
    assert not (size[rows[~chosen]] <= left).any()
    best = {c: max(worth[list(s)].sum() for s in full_sets(size.tolist(), c)) for c in range(room + 1)}
    assert worth[taken].sum() == best[room]
    worth_by_room(rows, n, worth, size, room, table, by_room)
    assert by_room.tolist() == [best[c] for c in range(room + 1)]


def scene(jobs, part, gpus, spans=(), owed=None, patience_turns=1e9):
    """`jobs` are (user, size); the last len(spans) of them span nodes, as ((node, GPUs), ...)."""
    size = np.array([s for _, s in jobs], np.int32)
    part = np.array(part, float)
    return Scene(
        user=np.array([u for u, _ in jobs], np.int32),
        size=size,
        small=len(jobs) - len(spans),
        waited_turns=np.zeros(len(jobs)),
        turn_quanta=np.ones(len(jobs)),
        patience_turns=patience_turns,
        gpus_of_node=np.array(gpus, np.int32),
        owed=np.zeros(len(part)) if owed is None else np.array(owed, float),
        part=part,
        urgency=np.ones(len(part)),
        span_start=np.cumsum([0, *(len(s) for s in spans)]).astype(np.int32),
        span_node=np.array([n for s in spans for n, _ in s], np.int32),
        span_gpus=np.array([g for s in spans for _, g in s], np.int32),
    )


def by_hand(where, it):
    """`outlook` for small jobs that fill their nodes, by trying all sets."""
    owed, off = it.owed.copy(), []
    for _ in range(ahead.QUANTA):
        had = np.zeros(len(it.part))
        for s, room in enumerate(it.gpus_of_node.tolist()):
            rows = [i for i in range(it.small) if where[i] == s]
            sizes = it.size[rows].tolist()
            worth = it.size[rows] * owed[it.user[rows]] / it.part[it.user[rows]]
            best = max(full_sets(sizes, room), key=lambda chosen: worth[list(chosen)].sum())
            for k in best:
                had[it.user[rows[k]]] += sizes[k]
        owed += it.part * had.sum() / it.part.sum() - had
        off.append(np.abs(owed).max() / it.gpus_of_node.sum())
    return np.mean(np.square(off))


@pytest.mark.parametrize("seed", range(12))
def test_the_outlook_is_that_of_trying_all_sets_in_every_quantum(seed):
    rng = np.random.default_rng(seed)
    # Jobs of one GPU keep nodes full; parts with many digits keep sets from being worth the same.
    jobs = [(int(rng.integers(3)), int(rng.choice([1, 2, 3]))) for _ in range(6)] + [
        (k, 1) for k in range(3)
    ] * 2
    where = np.array([0, 1] * 3 + [0] * 3 + [1] * 3, np.int32)
    it = scene(jobs, 1 + rng.random(3), [3, 3], owed=rng.normal(size=3))
    assert outlook(where, it.span_node, it, 1e300) == pytest.approx(by_hand(where, it))
    assert outlook(where, it.span_node, it, 1e-6) == 1e-6  # no more than needed to know


def test_a_gang_leaves_the_node_of_those_who_should_always_run_for_one_where_it_can():
    # User 0 should have its two jobs run always; user 1's gang waits beside them, and user 2 has node 1 alone.
    jobs = [(0, 2), (0, 2), (1, 4), (2, 4)]
    it = scene(jobs, [4.0, 2.0, 2.0], [4, 4])
    where = np.array([0, 0, 0, 1], np.int32)
    before = outlook(where, it.span_node, it, 1e300)
    moves = list(better_places(where, it, np.ones(4, bool), 0, 8))
    assert moves == [(2, 0, 1)]
    where[2] = 1
    assert outlook(where, it.span_node, it, 1e300) < 0.1 * before
    assert list(better_places(where, it, np.ones(4, bool), 0, 8)) == []


def test_nobody_moves_who_rests_and_no_more_than_may():
    it = scene([(0, 2), (0, 2), (1, 4), (2, 4)], [4.0, 2.0, 2.0], [4, 4])
    where = np.array([0, 0, 0, 1], np.int32)
    assert list(better_places(where, it, np.zeros(4, bool), 0, 8)) == []
    assert list(better_places(where, it, np.ones(4, bool), 0, 0)) == []


def test_a_gang_that_spans_nodes_changes_one_of_them_for_another():
    # Three nodes of 2: user 0 should run on node 0 always; user 1's gang of 4 needs node 0, or may have node 2.
    it = scene([(0, 2), (2, 2), (2, 2), (1, 4)], [2.0, 2.0, 2.0], [2, 2, 2], spans=[((0, 2), (1, 2))])
    where = np.array([0, 1, 2], np.int32)
    assert list(better_places(where, it, np.array([False, False, False, True]), 0, 8)) == [(3, 0, 2)]
