"""The packing kernels against plain-Python references on random input."""

from __future__ import annotations

import itertools

import hypothesis.strategies as st
import numpy as np
from hypothesis import given, settings

from shoal.placement import pack

AVAIL = st.lists(st.integers(0, 5), min_size=1, max_size=7)


def zones(n: int, per: int) -> np.ndarray:
    return (np.arange(n) // per).astype(np.int32)


@given(avail=AVAIL, need=st.integers(1, 6), near=st.integers(-1, 2))
@settings(max_examples=200, deadline=None)
def test_best_node_is_the_tightest_in_the_near_rack_else_the_tightest_anywhere(avail, need, near):
    racks = zones(len(avail), 3)
    fits = [n for n, a in enumerate(avail) if a >= need]
    expected = min(fits, key=lambda n: (near >= 0 and racks[n] != near, avail[n], n), default=-1)
    assert pack.best_node(np.array(avail, np.int32), need, racks, near) == expected


@given(avail=AVAIL, need=st.integers(1, 20))
@settings(max_examples=200, deadline=None)
def test_a_span_holds_the_need_on_fewest_nodes_and_in_one_rack_if_one_rack_can(avail, need):
    racks, domains = zones(len(avail), 2), zones(len(avail), 4)
    free = np.array(avail, np.int32)
    taken = pack.span(free, need, racks, domains)
    assert (taken <= free).all()
    assert taken.sum() == min(need, free.sum())
    if free.sum() < need:
        return

    def count(nodes) -> int:
        sizes = [avail[n] for n in nodes]
        for k in range(1, len(sizes) + 1):
            if any(sum(c) >= need for c in itertools.combinations(sizes, k)):
                return k
        return len(avail) + 1

    fewest = count(range(len(avail)))
    assert np.count_nonzero(taken) == fewest
    if any(count(np.flatnonzero(racks == r)) == fewest for r in set(racks)):
        assert len(set(racks[taken > 0])) == 1
    elif any(count(np.flatnonzero(domains == d)) == fewest for d in set(domains)):
        assert len(set(domains[taken > 0])) == 1


@given(avail=AVAIL, need=st.integers(1, 20))
@settings(max_examples=100, deadline=None)
def test_whole_nodes_are_idle_nodes_taken_entirely(avail, need):
    size = np.full(len(avail), 4, np.int32)
    free = np.minimum(np.array(avail, np.int32), 4)
    taken = pack.whole_nodes(free, size, need, zones(len(avail), 2), zones(len(avail), 4))
    assert set(taken.tolist()) <= {0, 4}
    assert (taken <= free).all()
    assert taken.sum() == 4 * min(need // 4, int((free == 4).sum()))
