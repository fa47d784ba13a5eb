"""The candidates of AFS-L's fold: their lengths and gains, in blocks of jobs and groups of blocks.

A column per candidate, block or group. Those of a block or a group carry the best values of all below them, so
that whole blocks and groups are passed over where nobody can beat the holder. All three are looked at eight
at a time (`lanes`).

Nobody beats most holders because the many with gains like theirs are longer and the shorter ones gain less.
So blocks and groups also carry the shortest length among those whose gain reaches a bar.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from shoal.policies.base import FloatArray, IntArray
from shoal.policies.lanes import LANES, best_of_blocks, best_of_jobs, first_that_may, first_to_beat

# Rows: the length, and the gains as the shorter and as the longer job: of a candidate, or the shortest length
# and the largest gains below; then, but for candidates, the shortest length of those whose gain as the shorter
# job reaches the bar.
LENGTH, SHORT, LONG, ABOVE = 0, 1, 2, 3


@njit(cache=True)
def plant(
    held: IntArray, limit: IntArray, left: FloatArray, speeds: FloatArray, begin: IntArray
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """The candidates and what their blocks and groups carry, without a bar."""
    jobs = _columns(len(held))
    blocks = _columns(jobs.shape[1] // LANES)
    groups = _columns(blocks.shape[1] // LANES)
    for i in range(len(held)):
        set_job(jobs, i, held[i], limit[i], left[i], speeds, begin[i])
    set_bar(jobs, blocks, groups, np.inf)
    return jobs, blocks, groups


@njit(cache=True)
def _columns(count: int) -> FloatArray:
    """Columns that take no part, up to a multiple of LANES."""
    columns = np.empty((4, (count + LANES - 1) // LANES * LANES))
    for i in range(columns.shape[1]):
        _leave(columns, i)
        columns[ABOVE, i] = np.inf
    return columns


@njit(cache=True, inline="always")
def _leave(columns: FloatArray, i: int) -> None:
    columns[LENGTH, i], columns[SHORT, i], columns[LONG, i] = np.inf, -np.inf, -np.inf


@njit(cache=True, inline="always")
def set_job(
    jobs: FloatArray, i: int, gpus: int, limit: int, left: float, speeds: FloatArray, at: int
) -> None:
    """A candidate's length and gains at its share; at its cap it takes no further part."""
    if gpus >= limit:
        _leave(jobs, i)
        return
    now, then = speeds[at + gpus], speeds[at + gpus + 1]
    jobs[LENGTH, i] = left / now
    jobs[SHORT, i], jobs[LONG, i] = (then - now) / now, (then - now) / then


@njit(cache=True)
def set_bar(jobs: FloatArray, blocks: FloatArray, groups: FloatArray, bar: float) -> None:
    """Bring all blocks and groups up to date, with this bar."""
    for b in range(jobs.shape[1] // LANES):
        _pull_block(jobs, blocks, b, bar)
    for g in range(blocks.shape[1] // LANES):
        _pull_group(blocks, groups, g)


@njit(cache=True, inline="always")
def lift(jobs: FloatArray, blocks: FloatArray, groups: FloatArray, i: int, bar: float) -> None:
    """Bring the block and the group of a candidate up to date."""
    _pull_block(jobs, blocks, i // LANES, bar)
    if blocks.shape[1] > LANES:
        _pull_group(blocks, groups, i // LANES // LANES)


@njit(cache=True, inline="always")
def _pull_block(jobs: FloatArray, blocks: FloatArray, b: int, bar: float) -> None:
    length, short, long_, above = best_of_jobs(jobs, b * LANES, bar)
    blocks[LENGTH, b], blocks[SHORT, b], blocks[LONG, b], blocks[ABOVE, b] = length, short, long_, above


@njit(cache=True, inline="always")
def _pull_group(blocks: FloatArray, groups: FloatArray, g: int) -> None:
    length, short, long_, above = best_of_blocks(blocks, g * LANES)
    groups[LENGTH, g], groups[SHORT, g], groups[LONG, g], groups[ABOVE, g] = length, short, long_, above


@njit(cache=True, inline="always")
def next_to_beat(
    jobs: FloatArray, blocks: FloatArray, groups: FloatArray, start: int, holder: int, bar: float
) -> tuple[int, float, float, int]:
    """The first candidate from `start` on that beats the holder, or -1.

    Then the largest gains set against the holder so far: as the shorter job, of those that are not longer,
    and as the longer job, of all; and how many were looked at because of what their block carries.
    """
    length, short, long_ = jobs[LENGTH, holder], jobs[SHORT, holder], jobs[LONG, holder]
    b = start // LANES
    at, rival_short, rival_long = first_to_beat(jobs, b * LANES, start - b * LANES, length, short, long_)
    looked_at = 0
    while at == LANES:
        b, more_short, more_long = _next_block(blocks, groups, b + 1, length, short, long_, bar)
        rival_short, rival_long = max(rival_short, more_short), max(rival_long, more_long)
        if b < 0:
            return -1, rival_short, rival_long, looked_at
        looked_at += LANES
        at, more_short, more_long = first_to_beat(jobs, b * LANES, 0, length, short, long_)
        rival_short, rival_long = max(rival_short, more_short), max(rival_long, more_long)
    return b * LANES + at, rival_short, rival_long, looked_at


@njit(cache=True, inline="always")
def _next_block(
    blocks: FloatArray, groups: FloatArray, b: int, length: float, short: float, long_: float, bar: float
) -> tuple[int, float, float]:
    """The first block from b on that may have one to beat the holder, or -1; and the largest gains so far."""
    rival_short, rival_long = -np.inf, -np.inf
    g = b // LANES
    skip = b - g * LANES
    while g * LANES < blocks.shape[1]:
        at, more_short, more_long = first_that_may(blocks, g * LANES, skip, length, short, long_, bar)
        rival_short, rival_long = max(rival_short, more_short), max(rival_long, more_long)
        if at < LANES:
            return g * LANES + at, rival_short, rival_long
        g, skip = g + 1, 0
        while g * LANES < blocks.shape[1]:  # on to the next group that may
            k = g // LANES
            at, more_short, more_long = first_that_may(
                groups, k * LANES, g - k * LANES, length, short, long_, bar
            )
            rival_short, rival_long = max(rival_short, more_short), max(rival_long, more_long)
            g = k * LANES + at
            if at < LANES:
                break
    return -1, rival_short, rival_long
