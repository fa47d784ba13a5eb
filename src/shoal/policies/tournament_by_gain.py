"""The tournament of AFS without lengths (AFS-P): who gets the next GPU, one after the other, exactly.

The same left fold as in `tournament`, of a simpler relation. A job's gain by one GPU more counts as `short` if
it is the shorter of two and as `long` if it is the longer one; who wins whichever of them is longer wins, and
where that depends on the unknown lengths a tie rule decides: who comes first or last in the fold, or a coin,
tossed anew in every comparison for every GPU.

Most folds need not be walked from their beginning. Coins are a hash of the decision, the GPU and the challenger's
place, so each can be looked at without those before it, and many at a time. From behind, the first challenger to
whom its coin is kind and whose `short` is above every `long` beats whoever holds before it; so does the job of the
largest `long` where that reaches every `short` before it. The fold goes on from there, to the next that beats a
holder, found by what blocks of jobs carry (`candidates`, all of one length here).
"""

from __future__ import annotations

import numpy as np

from shoal.core.compiled import inlined, kernel
from shoal.policies.base import FloatArray, IntArray
from shoal.policies.candidates import (
    LENGTH,
    LONG,
    SHORT,
    largest_before,
    lift,
    next_block,
    plant,
    set_job,
    with_largest,
)
from shoal.policies.lanes import LANES, highest_bit, lowest_bit, who_beats, who_gains_above

#: What decides where lengths would: a coin, or the order of the fold.
BY_COIN, FIRST, LAST = 1, 2, 3


@inlined
def coins(tie: int, nonce: int, gpu: int, word: int) -> int:
    """64 coins, a bit each, of challengers at places from 64 * word on: set if heads, for the challenger.

    The same for the same arguments, a 64-bit mix of all of them.
    """
    if tie != BY_COIN:
        return -1 if tie == LAST else 0
    place = (np.uint64(gpu) << np.uint64(32)) | np.uint64(word)
    x = np.uint64(nonce) + place * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return int(np.int64(x ^ (x >> np.uint64(31))))


@inlined
def _coins_of_block(tie: int, nonce: int, gpu: int, b: int) -> int:
    """Those of the eight candidates of a block."""
    return coins(tie, nonce, gpu, b // LANES) >> b % LANES * LANES


@kernel
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
    """Hand out `gpus` one by one among `rows`, which all have a share: each to the winner of the fold over them."""
    n, need = len(rows), 0
    held, limit, begin = np.empty(n, np.int32), np.empty(n, np.int32), np.empty(n, np.int32)
    for i in range(n):
        r = rows[i]
        held[i], limit[i], begin[i] = share[r], cap[r], at[r]
        need += max(limit[i] - held[i], 0)
    if need <= gpus:
        for i in range(n):
            share[rows[i]] = max(held[i], limit[i])
        return
    columns, begins = plant(held, limit, np.zeros(n), speeds, begin)
    best = -1
    while gpus > 0:
        if best < 0:
            best = with_largest(columns, begins)
        w = _winner(columns, begins, n, best, tie, nonce, gpus)
        held[w] += 1
        gpus -= 1
        set_job(columns, w, held[w], limit[w], 0.0, speeds, begin[w])
        lift(columns, begins, w, np.inf)
        if w == best or columns[LONG, w] > columns[LONG, best]:
            best = -1
    for i in range(n):
        share[rows[i]] = held[i]


@inlined
def _winner(columns: FloatArray, begins: IntArray, n: int, best: int, tie: int, nonce: int, gpu: int) -> int:
    """Who is left of the fold; `best` gains most as the longer job."""
    holder = _last_with_luck(columns, begins, n, columns[LONG, best], tie, nonce, gpu)
    if holder < 0 and columns[LONG, best] >= largest_before(columns, begins, best):
        holder = best
    if holder < 0:
        holder = 0
        while columns[SHORT, holder] == -np.inf:
            holder += 1
    found = holder
    while found >= 0:
        holder = found
        found = _next_to_beat(columns, begins, holder, tie, nonce, gpu)
    return holder


@inlined
def _last_with_luck(
    columns: FloatArray, begins: IntArray, end: int, bound: float, tie: int, nonce: int, gpu: int
) -> int:
    """The last one that gains more than this as the shorter job and to whom its coin is kind, or -1."""
    level, top, at = 0, len(begins) - 2, end
    while at > 0 and tie != FIRST:
        eight = (at - 1) // LANES
        bits = who_gains_above(columns, begins[level] + eight * LANES, bound) & ~(-1 << at - eight * LANES)
        if level == 0:
            bits &= _coins_of_block(tie, nonce, gpu, eight)
        if bits:
            at = eight * LANES + highest_bit(bits)
            if level == 0:
                return at
            level, at = level - 1, (at + 1) * LANES
        elif level < top:
            level, at = level + 1, eight
        else:
            at = eight * LANES
    return -1


@inlined
def _next_to_beat(columns: FloatArray, begins: IntArray, holder: int, tie: int, nonce: int, gpu: int) -> int:
    """The first candidate after the holder that beats it, or -1."""
    short, long_ = columns[SHORT, holder], columns[LONG, holder]
    b = holder // LANES
    asked = -1 << holder - b * LANES + 1
    while b >= 0:
        by_coin, surely = who_beats(columns, b * LANES, short, long_)
        bits = (by_coin & _coins_of_block(tie, nonce, gpu, b) | surely) & asked
        if bits:
            return b * LANES + lowest_bit(bits)
        b, asked = next_block(columns, begins, b + 1, LENGTH, 0.0, short, long_), -1
    return -1
