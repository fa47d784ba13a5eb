"""The tournament of AFS without lengths (AFS-P): who gets the next GPU, one after the other, exactly.

The same left fold, chain and tree as in `tournament`, of a simpler relation. A job's gain by one GPU more
counts as `short` if it is the shorter of two and as `long` if it is the longer one; who wins whichever of
them is longer wins, and where that depends on the unknown lengths a tie rule decides. Nodes of the tree
need only carry the largest `short` below them.

Coins that decide by chance are a hash of the decision, the two jobs and their shares, so that a comparison
made again has the same outcome and need not be made again.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from shoal.policies.base import FloatArray, IntArray

#: What decides where lengths would: a coin, or the order of submission.
BY_COIN, FIRST, LAST = 1, 2, 3

_BLOCK = 8


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
    blocks = 1
    while blocks * _BLOCK < m:
        blocks *= 2
    short, long_ = np.full(blocks * _BLOCK, -np.inf), np.full(blocks * _BLOCK, -np.inf)
    for i in range(m):
        _set_gains(short, long_, i, held[i], limit[i], speeds, begin[i])
    best = np.full(2 * blocks, -np.inf)  # block b is node `blocks + b`, the parent of node k is k // 2
    for b in range(blocks):
        best[blocks + b] = _best_of(short, b * _BLOCK)
    for k in range(blocks - 1, 0, -1):
        best[k] = max(best[2 * k], best[2 * k + 1])
    chain, rival = np.empty(m + 1, np.int32), np.empty(m + 1)
    top, first, start = -1, 0, 0  # as in `tournament.hand_out`
    while gpus > 0:
        if top < 0:
            while short[first] == -np.inf:
                first += 1
            chain[0], rival[0], top, start = first, -np.inf, 0, first + 1
        while start < m:
            found, gain = _next_to_beat(short, long_, best, blocks, held, start, chain[top], tie, nonce)
            rival[top] = max(rival[top], gain)
            if found < 0:
                break
            top += 1
            chain[top], rival[top], start = found, -np.inf, found + 1
        w = chain[top]
        trouble = max(rival[top], short[chain[top - 1]]) if top > 0 else rival[top]
        while True:
            held[w] += 1
            gpus -= 1
            if gpus == 0 or held[w] >= limit[w]:
                break
            now, then = speeds[begin[w] + held[w]], speeds[begin[w] + held[w] + 1]
            if not (then - now) / then > trouble:
                break
        _set_gains(short, long_, w, held[w], limit[w], speeds, begin[w])
        _lift(short, best, blocks, w // _BLOCK)
        top -= 1
        start = w
    for i in range(m):
        share[rows[i]] = held[i]


@njit(cache=True, inline="always")
def _set_gains(
    short: FloatArray, long_: FloatArray, i: int, gpus: int, limit: int, speeds: FloatArray, at: int
) -> None:
    """A candidate's gains at its share; at its cap it takes no further part."""
    if gpus >= limit:
        short[i] = long_[i] = -np.inf
        return
    now, then = speeds[at + gpus], speeds[at + gpus + 1]
    short[i], long_[i] = (then - now) / now, (then - now) / then


@njit(cache=True, inline="always")
def _best_of(short: FloatArray, begin: int) -> float:
    best = short[begin]
    for i in range(begin + 1, begin + _BLOCK):
        best = max(best, short[i])
    return best


@njit(cache=True, inline="always")
def _lift(short: FloatArray, best: FloatArray, blocks: int, b: int) -> None:
    """Bring the nodes above a block up to date, as far up as it makes a difference."""
    k, new = blocks + b, _best_of(short, b * _BLOCK)
    while k > 0 and best[k] != new:
        best[k] = new
        new = max(new, best[k ^ 1])
        k >>= 1


@njit(cache=True, inline="always")
def _next_to_beat(
    short: FloatArray,
    long_: FloatArray,
    best: FloatArray,
    blocks: int,
    held: IntArray,
    start: int,
    holder: int,
    tie: int,
    nonce: int,
) -> tuple[int, float]:
    """The first candidate from `start` on that beats the holder, or -1; and the largest gain set against it."""
    bound = long_[holder]
    rival = -np.inf
    begin, k = start, blocks + start // _BLOCK
    while True:
        for i in range(begin, (k - blocks + 1) * _BLOCK):
            if short[i] >= bound and _wins(short, long_, held, i, holder, tie, nonce):
                return i, rival
            rival = max(rival, short[i])
        while True:  # on to the next block with a gain that could win
            while k & 1:
                k >>= 1
            if k == 0:
                return -1, rival
            k += 1
            while k < blocks and best[k] >= bound:
                k *= 2
            if best[k] >= bound:
                break
            rival = max(rival, best[k])
        begin = (k - blocks) * _BLOCK


@njit(cache=True, inline="always")
def _wins(
    short: FloatArray, long_: FloatArray, held: IntArray, challenger: int, holder: int, tie: int, nonce: int
) -> bool:
    if long_[challenger] >= short[holder]:
        return True
    if long_[holder] >= short[challenger]:
        return False
    if tie == BY_COIN:
        return coin(nonce, holder, challenger, held[holder], held[challenger])
    return tie == LAST
