"""The tournament of AFS without lengths (AFS-P): who gets the next GPU, one after the other, exactly.

The same left fold and chain as in `tournament`, of a simpler relation. A job's gain by one GPU more
counts as `short` if it is the shorter of two and as `long` if it is the longer one; who wins whichever of
them is longer wins, and where that depends on the unknown lengths a tie rule decides. Blocks of jobs and
groups of blocks need only carry the largest `short` below them.

Coins that decide by chance are a hash of the decision, the two jobs and their shares, so that a comparison
made again has the same outcome and need not be made again.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from shoal.policies.base import FloatArray, IntArray
from shoal.policies.gains import gains
from shoal.policies.lanes import LANES, first_at_least, largest_of, lowest_bit, who_beats

#: What decides where lengths would: a coin, or the order of submission.
BY_COIN, FIRST, LAST = 1, 2, 3

_SHORT, _LONG = 0, 1


@njit(cache=True, inline="always")
def coin(nonce: int, holder: int, challenger: int, holder_gpus: int, challenger_gpus: int) -> bool:
    """Heads or tails, the same for the same arguments (a 64-bit mix of all of them)."""
    x = np.uint64(nonce) ^ (np.uint64(holder) << np.uint64(40)) ^ (np.uint64(challenger) << np.uint64(16))
    x ^= (np.uint64(holder_gpus) << np.uint64(52)) ^ np.uint64(challenger_gpus)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((x ^ (x >> np.uint64(31))) & np.uint64(1)) == np.uint64(1)


@njit(cache=True)
def hand_out_by_gain(
    share: IntArray,
    rows: IntArray,
    speeds: FloatArray,
    at: IntArray,
    cap: IntArray,
    gpus: int,
    tie: int,
    nonce: int,
) -> None:
    """Hand out `gpus` one by one among `rows`, which all have a share, each to the winner of the fold."""
    m = len(rows)
    held, limit, begin = np.empty(m, np.int32), np.empty(m, np.int32), np.empty(m, np.int32)
    need = 0
    for i in range(m):
        r = rows[i]
        held[i], limit[i], begin[i] = share[r], cap[r], at[r]
        need += limit[i] - held[i]
    if need <= gpus:
        for i in range(m):
            share[rows[i]] = limit[i]
        return
    jobs = _columns(m)
    blocks = _columns(jobs.shape[1] // LANES)
    groups = _columns(blocks.shape[1] // LANES)
    for i in range(m):
        jobs[_SHORT, i], jobs[_LONG, i] = gains(speeds, begin[i], held[i], limit[i])
    for i in range(0, m, LANES):
        _lift(jobs, blocks, groups, i)
    chain, rival = np.empty(m + 1, np.int32), np.empty(m + 1)
    top, first, start = -1, 0, 0  # as in `tournament.hand_out`
    while gpus > 0:
        if top < 0:
            while jobs[_SHORT, first] == -np.inf:
                first += 1
            chain[0], rival[0], top, start = first, -np.inf, 0, first + 1
        while start < m:
            found, gain = _next_to_beat(jobs, blocks, groups, held, start, chain[top], tie, nonce)
            rival[top] = max(rival[top], gain)
            if found < 0:
                break
            top += 1
            chain[top], rival[top], start = found, -np.inf, found + 1
        w = chain[top]
        trouble = max(rival[top], jobs[_SHORT, chain[top - 1]]) if top > 0 else rival[top]
        while True:
            held[w] += 1
            gpus -= 1
            if gpus == 0 or held[w] >= limit[w]:
                break
            now, then = speeds[begin[w] + held[w]], speeds[begin[w] + held[w] + 1]
            if not (then - now) / then > trouble:
                break
        jobs[_SHORT, w], jobs[_LONG, w] = gains(speeds, begin[w], held[w], limit[w])
        _lift(jobs, blocks, groups, w)
        top -= 1
        start = w
    for i in range(m):
        share[rows[i]] = held[i]


@njit(cache=True)
def _columns(count: int) -> FloatArray:
    """Columns that take no part, up to a multiple of LANES."""
    columns = np.empty((2, (count + LANES - 1) // LANES * LANES))
    for i in range(columns.shape[1]):
        columns[_SHORT, i] = columns[_LONG, i] = -np.inf
    return columns


@njit(cache=True, inline="always")
def _lift(jobs: FloatArray, blocks: FloatArray, groups: FloatArray, i: int) -> None:
    """Bring the block and the group of a candidate up to date."""
    b = i // LANES
    blocks[_SHORT, b] = largest_of(jobs, b * LANES, 0, LANES)
    if blocks.shape[1] > LANES:
        groups[_SHORT, b // LANES] = largest_of(blocks, b // LANES * LANES, 0, LANES)


@njit(cache=True, inline="always")
def _next_to_beat(
    jobs: FloatArray,
    blocks: FloatArray,
    groups: FloatArray,
    held: IntArray,
    start: int,
    holder: int,
    tie: int,
    nonce: int,
) -> tuple[int, float]:
    """The first candidate from `start` on that beats the holder, or -1; and the largest gain set against it."""
    short, long_, rival = jobs[_SHORT, holder], jobs[_LONG, holder], -np.inf
    b = start // LANES
    skip = start - b * LANES
    while True:
        may, surely = who_beats(jobs, b * LANES, skip, short, long_)
        while may:
            lane = lowest_bit(may)
            i = b * LANES + lane
            # Equal gains, the holder's as the longer one, are the holder's win.
            wins = surely >> lane & 1 or (jobs[_SHORT, i] > long_ and tie == LAST)
            if not wins and jobs[_SHORT, i] > long_ and tie == BY_COIN:
                wins = coin(nonce, holder, i, held[holder], held[i])
            if wins:
                return i, max(rival, largest_of(jobs, b * LANES, skip, lane))
            may &= may - 1
        rival = max(rival, largest_of(jobs, b * LANES, skip, LANES))
        b, gain = _next_block(blocks, groups, b + 1, long_)
        rival, skip = max(rival, gain), 0
        if b < 0:
            return -1, rival


@njit(cache=True, inline="always")
def _next_block(blocks: FloatArray, groups: FloatArray, b: int, bound: float) -> tuple[int, float]:
    """The first block from b on with a gain that could win, or -1; and the largest gain before it."""
    g, rival = b // LANES, -np.inf
    skip = b - g * LANES
    while g * LANES < blocks.shape[1]:
        at, gain = first_at_least(blocks, g * LANES, skip, bound)
        rival = max(rival, gain)
        if at < LANES:
            return g * LANES + at, rival
        g, skip = g + 1, 0
        while g * LANES < blocks.shape[1]:  # on to the next group that has one
            k = g // LANES
            at, gain = first_at_least(groups, k * LANES, g - k * LANES, bound)
            rival = max(rival, gain)
            g = k * LANES + at
            if at < LANES:
                break
    return -1, rival
