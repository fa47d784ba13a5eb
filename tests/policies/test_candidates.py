"""Searching eight at a time finds what looking at one after the other finds."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from numba import njit

from shoal.policies.afs.candidates import (
    ABOVE,
    LENGTH,
    LONG,
    SHORT,
    lift,
    next_to_beat,
    plant,
    set_bar,
    set_job,
)

FEW = np.array([0.1, 0.2, 0.3, 0.5])  # so that many are equal


@njit
def search(columns, begins, start, holder, bar):  # type: ignore[no-untyped-def]
    return next_to_beat(columns, begins, start, holder, bar)


@njit
def change(columns, begins, i, gpus, limit, left, speeds, at, bar):  # type: ignore[no-untyped-def]
    set_job(columns, i, gpus, limit, left, speeds, at)
    lift(columns, begins, i, bar)


def one_by_one(jobs: np.ndarray, start: int, holder: int) -> int:
    """The first that beats the holder."""
    length, short, long_ = jobs[:3, holder]
    for i in range(start, jobs.shape[1]):
        if (jobs[SHORT, i] >= long_) if jobs[LENGTH, i] <= length else (jobs[LONG, i] > short):
            return i
    return -1


@pytest.mark.parametrize("count", [1, 7, 8, 9, 63, 64, 65, 200, 513, 1100, 5000])
def test_the_next_to_beat_a_holder_is_the_first_that_does_with_any_bar(count: int) -> None:
    rng = np.random.default_rng(count)
    for trial in range(6):
        steps = rng.choice(FEW, (count, 4)) if trial % 2 else rng.uniform(-0.05, 0.6, (count, 4))
        speeds = np.concatenate(
            [np.cumprod(np.column_stack([np.ones(count), 1 + steps]), axis=1)], axis=1
        ).ravel()
        at = (5 * np.arange(count)).astype(np.int32)
        held, limit = rng.integers(0, 4, count).astype(np.int32), np.full(count, 4, np.int32)
        left = rng.choice(FEW, count) if trial % 3 else rng.lognormal(3, 2, count)
        columns, begins = plant(held, limit, left, speeds, at, trial % 2 == 1)
        bar = np.inf
        for _ in range(60):
            holder = int(rng.integers(count))
            if rng.random() < 0.3:
                bar = float(rng.choice([np.inf, 0.99 * columns[LONG, holder], 0.2]))
                set_bar(columns, begins, bar)
            held[holder] = rng.integers(0, 5)
            change(columns, begins, holder, held[holder], 4, left[holder], speeds, at[holder], bar)
            if held[holder] == 4:
                assert columns[SHORT, holder] == -np.inf, "one at its cap takes no part"
                continue
            start = int(rng.integers(holder, count))
            found, _ = search(columns, begins, start, holder, bar)
            assert found == one_by_one(columns[:, :count], start, holder)
            _check_what_blocks_carry(columns, begins, bar)


def _check_what_blocks_carry(columns: np.ndarray, begins: np.ndarray, bar: float) -> None:
    levels = [columns[:, a:b] for a, b in pairwise(begins)]
    levels[0] = levels[0].copy()
    levels[0][ABOVE] = np.where(levels[0][SHORT] >= bar, levels[0][LENGTH], np.inf)
    assert levels[-1].shape[1] <= 64
    for below, level in pairwise(levels):
        eights = below.reshape(len(below), -1, 8)
        width = eights.shape[1]
        assert (level[LENGTH, :width] == eights[LENGTH].min(axis=1)).all()
        assert (level[SHORT, :width] == eights[SHORT].max(axis=1)).all()
        assert (level[LONG, :width] == eights[LONG].max(axis=1)).all()
        assert (level[ABOVE, :width] == eights[ABOVE].min(axis=1)).all()
