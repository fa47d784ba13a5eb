"""The tournament of AFS without lengths (AFS-P): who gets the next GPU, one after the other, exactly.

The same left fold as in `tournament`, of a simpler relation. A job's gain by one GPU more counts as `short` if
it is the shorter of two and as `long` if it is the longer one; who wins whichever of them is longer wins, and
where that depends on the unknown lengths a tie rule decides: who comes first or last in the fold, or a coin,
tossed anew in every comparison for every GPU.

Most folds need not be walked from their beginning. Coins are a hash of the decision, the GPU and the challenger,
so each can be looked at without those before it. From behind, the first challenger to whom its coin is kind and
whose `short` is above every `long` beats whoever holds before it; so does the job of the largest `long` where that
reaches every `short` before it. The fold goes on from there, to the next that beats a holder, found by what
blocks of jobs carry (`candidates`, all of one length here).
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
    last_above,
    lift,
    next_block,
    plant,
    set_job,
    with_largest,
)
from shoal.policies.lanes import LANES, lowest_bit, who_beats

#: What decides where lengths would: a coin, or the order of the fold.
BY_COIN, FIRST, LAST = 1, 2, 3


@inlined
def coin(nonce: int, gpu: int, challenger: int) -> bool:
    """Heads or tails, the same for the same arguments (a 64-bit mix of all of them): heads for the challenger."""
    place = (np.uint64(gpu) << np.uint64(32)) | np.uint64(challenger)
    x = np.uint64(nonce) + place * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((x ^ (x >> np.uint64(31))) & np.uint64(1)) == np.uint64(1)


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
    n = len(rows)
    held, limit, begin = np.empty(n, np.int32), np.empty(n, np.int32), np.empty(n, np.int32)
    place = np.empty(n, np.int32)  # of each candidate in the fold
    m, need = 0, 0
    for i in range(n):
        r = rows[i]
        if share[r] < cap[r]:
            held[m], limit[m], begin[m], place[m] = share[r], cap[r], at[r], i
            need += limit[m] - held[m]
            m += 1
    if need <= gpus:
        for i in range(m):
            share[rows[place[i]]] = limit[i]
        return
    columns, begins = plant(held[:m], limit[:m], np.zeros(m), speeds, begin[:m])
    best = -1
    while gpus > 0:
        if best < 0:
            best = with_largest(columns, begins)
        w = _winner(columns, begins, place, m, best, tie, nonce, gpus)
        held[w] += 1
        gpus -= 1
        set_job(columns, w, held[w], limit[w], 0.0, speeds, begin[w])
        lift(columns, begins, w, np.inf)
        if w == best or columns[LONG, w] > columns[LONG, best]:
            best = -1
    for i in range(m):
        share[rows[place[i]]] = held[i]


@inlined
def _winner(
    columns: FloatArray, begins: IntArray, place: IntArray, m: int, best: int, tie: int, nonce: int, gpu: int
) -> int:
    """Who is left of the fold; `best` gains most as the longer job."""
    holder = m if tie != FIRST else -1
    while holder >= 0:
        holder = last_above(columns, begins, holder, columns[LONG, best])
        if tie == LAST or (holder >= 0 and coin(nonce, gpu, place[holder])):
            break
    if holder < 0 and columns[LONG, best] >= largest_before(columns, begins, best):
        holder = best
    if holder < 0:
        holder = 0
        while columns[SHORT, holder] == -np.inf:
            holder += 1
    found = holder
    while found >= 0:
        holder = found
        found = _next_to_beat(columns, begins, place, holder, tie, nonce, gpu)
    return holder


@inlined
def _next_to_beat(
    columns: FloatArray, begins: IntArray, place: IntArray, holder: int, tie: int, nonce: int, gpu: int
) -> int:
    """The first candidate after the holder that beats it, or -1."""
    short, long_ = columns[SHORT, holder], columns[LONG, holder]
    b = holder // LANES
    skip = holder - b * LANES + 1
    while b >= 0:
        may, surely = who_beats(columns, b * LANES, skip, short, long_)
        while may:
            lane = lowest_bit(may)
            i = b * LANES + lane
            # Equal gains, the holder's as the longer one, are the holder's win.
            if surely >> lane & 1 or (
                columns[SHORT, i] > long_ and (tie == LAST or (tie == BY_COIN and coin(nonce, gpu, place[i])))
            ):
                return i
            may &= may - 1
        b, skip = next_block(columns, begins, b + 1, LENGTH, 0.0, short, long_), 0
    return -1
