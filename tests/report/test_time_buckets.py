"""Values over time in buckets lose neither their integral nor their extremes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.sim.report.time_buckets import MAX_BUCKETS, Steps, bucket, coarsen, count_in, fold, width_for

entries = st.lists(
    st.tuples(st.integers(0, 600), st.integers(0, 64)), min_size=1, max_size=40, unique_by=lambda e: e[0]
)


def value_at(time_s, value, t):
    """The plain definition: what the last entry at or before t says, 0 before the first."""
    before = [v for at, v in zip(time_s, value) if at <= t]
    return before[-1] if before else 0


@settings(deadline=None, max_examples=60)
@given(entries, st.integers(1, 100), st.sampled_from([1.0, 8.0, 64.0, 1024.0]))
def test_means_and_extremes_are_those_of_the_steps(rows, beyond, width):
    rows = sorted(rows)
    time_s, value = [r[0] for r in rows], [r[1] for r in rows]
    end = time_s[-1] + beyond
    made = bucket(Steps.of(time_s, value, end), width)
    second = np.array([value_at(time_s, value, t) for t in range(end)], float)  # entries are at whole seconds
    assert (made.mean * made.covered_s).sum() == pytest.approx(second.sum())
    for k in range(len(made.mean)):
        inside = second[int(k * width) : int((k + 1) * width)]
        assert made.mean[k] == pytest.approx(inside.mean())
        assert made.low[k] == inside.min()
        assert made.high[k] == inside.max()


@settings(deadline=None, max_examples=60)
@given(entries, st.sampled_from([2, 4, 16]))
def test_merging_buckets_gives_what_wider_buckets_give(rows, factor):
    rows = sorted(rows)
    steps = Steps.of([r[0] for r in rows], [r[1] for r in rows], rows[-1][0] + 7.5)
    merged, direct = coarsen(bucket(steps, 8.0), 8.0 * factor), bucket(steps, 8.0 * factor)
    np.testing.assert_allclose(merged.mean, direct.mean, atol=1e-9)
    np.testing.assert_array_equal(merged.low, direct.low)
    np.testing.assert_array_equal(merged.high, direct.high)


@given(st.floats(1e-3, 1e10))
def test_the_width_is_the_least_power_of_two_that_fits(end_s):
    width = width_for(end_s)
    assert np.log2(width) == int(np.log2(width))
    assert np.ceil(end_s / width) <= MAX_BUCKETS < np.ceil(end_s / (width / 2)) + 1


def test_of_several_entries_at_one_moment_the_last_holds():
    made = bucket(Steps.of([0, 0, 4, 4], [9, 1, 60, 2], 8), 8.0)
    assert (made.mean[0], made.low[0], made.high[0]) == (1.5, 1, 2)


def test_counts_are_kept_whatever_the_width():
    times = np.random.default_rng(0).uniform(0, 1000, 300)
    narrow = count_in(times, 1000.0, 4.0)
    assert narrow.sum() == 300
    np.testing.assert_array_equal(fold(narrow, 8), count_in(times, 1000.0, 32.0))
