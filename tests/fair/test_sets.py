"""Sets that leave no GPU idle which another could use."""

from itertools import combinations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.policies.gandiva_fair.sets import by_size, full_set, worth_by_room

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
