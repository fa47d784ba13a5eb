"""Searching eight at a time finds what looking at one after the other finds."""

from __future__ import annotations

import numpy as np
import pytest
from numba import njit

from shoal.policies.candidates import ABOVE, LENGTH, LONG, SHORT, lift, next_to_beat, plant, set_bar, set_job

FEW = np.array([0.1, 0.2, 0.3, 0.5])  # so that many are equal


@njit
def search(jobs, blocks, groups, start, holder, bar):  # type: ignore[no-untyped-def]
    return next_to_beat(jobs, blocks, groups, start, holder, bar)


@njit
def change(jobs, blocks, groups, i, gpus, limit, left, speeds, at, bar):  # type: ignore[no-untyped-def]
    set_job(jobs, i, gpus, limit, left, speeds, at)
    lift(jobs, blocks, groups, i, bar)


def one_by_one(jobs: np.ndarray, count: int, start: int, holder: int) -> tuple[int, float, float]:
    """The first that beats the holder, and the largest gains that were set against it before."""
    length, short, long_ = jobs[:3, holder]
    rival_short = rival_long = -np.inf
    for i in range(start, count):
        if (jobs[SHORT, i] >= long_) if jobs[LENGTH, i] <= length else (jobs[LONG, i] > short):
            return i, rival_short, rival_long
        if jobs[LENGTH, i] <= length:
            rival_short = max(rival_short, jobs[SHORT, i])
        rival_long = max(rival_long, jobs[LONG, i])
    return -1, rival_short, rival_long


@pytest.mark.parametrize("count", [1, 7, 8, 9, 63, 64, 65, 200, 513, 1100])
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
        jobs, blocks, groups = plant(held, limit, left, speeds, at)
        bar = np.inf
        for _ in range(60):
            holder = int(rng.integers(count))
            if rng.random() < 0.3:
                bar = float(rng.choice([np.inf, 0.99 * jobs[LONG, holder], 0.2]))
                set_bar(jobs, blocks, groups, bar)
            held[holder] = rng.integers(0, 5)
            change(jobs, blocks, groups, holder, held[holder], 4, left[holder], speeds, at[holder], bar)
            if held[holder] == 4:
                assert jobs[SHORT, holder] == -np.inf, "one at its cap takes no part"
                continue
            start = int(rng.integers(holder, count))
            found, rival_short, rival_long, _ = search(jobs, blocks, groups, start, holder, bar)
            expected, short, long_ = one_by_one(jobs, count, start, holder)
            assert found == expected
            # What is not looked at one by one may be told larger than it is, but never smaller.
            assert rival_short >= short
            assert rival_long >= long_
            _check_what_blocks_carry(jobs, blocks, groups, bar)


def _check_what_blocks_carry(jobs: np.ndarray, blocks: np.ndarray, groups: np.ndarray, bar: float) -> None:
    for b in range(jobs.shape[1] // 8):
        below = jobs[:, 8 * b : 8 * b + 8]
        assert blocks[LENGTH, b] == below[LENGTH].min()
        assert blocks[SHORT, b] == below[SHORT].max()
        assert blocks[LONG, b] == below[LONG].max()
        assert blocks[ABOVE, b] == below[LENGTH][below[SHORT] >= bar].min(initial=np.inf)
    if blocks.shape[1] > 8:
        for g in range(blocks.shape[1] // 8):
            part = blocks[:, 8 * g : 8 * g + 8]
            assert groups[SHORT, g] == part[SHORT].max()
            assert groups[ABOVE, g] == part[ABOVE].min()
