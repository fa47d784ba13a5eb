"""The tournament of AFS without lengths (AFS-P): who gets the next GPU, one after the other, exactly.

The same left fold as in `tournament`, of a simpler relation. A job's gain by one GPU more counts as `short` if
it is the shorter of two and as `long` if it is the longer one; who wins whichever of them is longer wins, and
where that depends on the unknown lengths a tie rule decides: who comes first or last in the fold, or a coin,
tossed anew in every comparison for every GPU. Who is left of a fold is found by `look_back`.

Where a few jobs gain so much that no other can win they play by themselves, until that is no longer so: then all play.
The winner is that of the fold over all, if the places that coins go by are counted among those that play.
"""

from __future__ import annotations

import numpy as np

from shoal.core.arrays import FloatArray, IntArray
from shoal.core.compiled import borrower, kernel
from shoal.policies.afs.candidates import (
    LONG,
    SHORT,
    largest_of_others,
    lift_gains,
    plant,
    turn,
    with_largest,
)
from shoal.policies.afs.coins import FIRST, LARGEST
from shoal.policies.afs.gains import gains
from shoal.policies.afs.look_back import nothing_seen, winner_by_coins, winner_by_order

#: Who contends with whom is followed so far.
_STEPS = 16


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
    few = np.empty(n, np.int32)
    m, rest = (
        (0, -np.inf) if tie == LARGEST else _contenders(few, np.empty((2, n)), held, limit, begin, speeds)
    )
    while gpus > 0:
        if m == 0:
            m, rest = n, -np.inf
            for i in range(n):
                few[i] = i
        own, most, start = np.empty(m, np.int32), np.empty(m, np.int32), np.empty(m, np.int32)
        lengths = np.empty(m)
        for i in range(m):
            own[i], most[i], start[i] = held[few[i]], limit[few[i]], begin[few[i]]
            lengths[i] = 0.0  # nobody knows
        columns, begins = plant(own, most, lengths, speeds, start, True)
        seen = nothing_seen(begins)
        gpus = _hand_out(columns, begins, seen, own, most, start, speeds, rest, gpus, tie, nonce)
        for i in range(m):
            held[few[i]] = own[i]
        m = 0
    for i in range(n):
        share[rows[i]] = held[i]


@borrower
def _contenders(
    few: IntArray, gained: FloatArray, held: IntArray, limit: IntArray, begin: IntArray, speeds: FloatArray
) -> tuple[int, float]:
    """Find those who beat all others whatever the coins: how many, and the largest gain of the others.

    None, if they are more than half of all (those at their cap are counted, too) or not found in so many steps.
    While that holds the fold is theirs alone: whoever held before the first of them loses to it, and nobody else takes
    it from them. The best is one, who may beat one of them by a coin is one, too, and so on.
    """
    n, bound = len(few), -np.inf
    for i in range(n):
        gained[0, i], gained[1, i] = gains(speeds, begin[i], held[i], limit[i])
        bound = max(bound, gained[1, i])
    for _ in range(_STEPS):
        least, rest, count = np.inf, -np.inf, 0
        for i in range(n):
            if gained[0, i] > bound:
                few[count] = i
                count += 1
                least = min(least, gained[1, i])
            else:
                rest = max(rest, gained[0, i])
        if count > n // 2:
            break
        if least >= rest:
            return count, rest
        bound = least
    return 0, -np.inf


@borrower
def _hand_out(
    columns: FloatArray,
    begins: IntArray,
    seen: FloatArray,
    held: IntArray,
    limit: IntArray,
    begin: IntArray,
    speeds: FloatArray,
    rest: float,
    gpus: int,
    tie: int,
    nonce: int,
) -> int:
    best, first = -1, 0
    while gpus > 0:
        while first < len(held) and held[first] >= limit[first]:
            first += 1
        if first == len(held):
            break
        if best < 0 or tie == LARGEST:
            best = with_largest(columns, begins, SHORT if tie == LARGEST else LONG)
        if tie == LARGEST:
            w = best
        elif tie == FIRST:
            w = winner_by_order(columns, begins, first, best, len(held), tie, nonce, gpus)
        else:
            w = winner_by_coins(columns, begins, seen, first, best, tie, nonce, gpus)
        others, again = np.inf, True
        while again:
            held[w] += 1
            gpus -= 1
            columns[SHORT, w], columns[LONG, w] = gains(speeds, begin[w], held[w], limit[w])
            if best >= 0 and (w == best or columns[LONG, w] > columns[LONG, best]):
                others, best = max(rest, largest_of_others(columns, begins, w)), -1
            again = gpus > 0 and columns[LONG, w] > others  # it beats them all, whoever is longer
        if rest > -np.inf and held[w] < limit[w] and (columns[LONG, w] < rest or columns[SHORT, w] <= rest):
            break
        turn(columns, w)
        lift_gains(columns, begins, w)
    return gpus
