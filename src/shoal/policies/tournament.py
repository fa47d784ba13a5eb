"""The tournament of AFS: who gets the next GPU, one GPU after the other, in few comparisons.

Each GPU goes to the winner of a left fold over the candidates in order of submission: the first job holds,
and each further one takes over if it beats the holder. The relation is not transitive, so the order of the
fold is part of the rule, and no sorting can replace it. What makes it quick and still exact:

- The holders form a chain, each the first job after its predecessor that beats it. A grant changes only
  the winner, which is the chain's end, so the chain before it stands.
- The next job that beats a holder is found in a tree whose nodes carry the best values below them.
- A winner whose gain even as the longer job exceeds all that could trouble it wins again unseen.

Coins that decide by chance are a hash of the decision, the two jobs and their shares, so that a comparison
made again has the same outcome and need not be made again.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from shoal.policies.base import FloatArray, IntArray

#: How two jobs compare: by length (AFS-L), or without lengths (AFS-P) and then by one of three tie rules.
BY_LENGTH, BY_COIN, FIRST, LAST = 0, 1, 2, 3


@njit(cache=True, inline="always")
def coin(nonce: int, holder: int, challenger: int, holder_gpus: int, challenger_gpus: int) -> bool:
    """Heads or tails, the same for the same arguments (a 64-bit mix of all of them)."""
    x = np.uint64(nonce) ^ (np.uint64(holder) << np.uint64(40)) ^ (np.uint64(challenger) << np.uint64(16))
    x ^= (np.uint64(holder_gpus) << np.uint64(52)) ^ np.uint64(challenger_gpus)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((x ^ (x >> np.uint64(31))) & np.uint64(1)) == np.uint64(1)


@njit(cache=True, inline="always")
def beats(
    rule: int,
    nonce: int,
    length: FloatArray,
    gain_short: FloatArray,
    gain_long: FloatArray,
    gpus: IntArray,
    challenger: int,
    holder: int,
) -> bool:
    """Whether the next GPU goes to the challenger rather than to the holder.

    gain_short is (p' - p)/p, what a job's next GPU brings if it is the shorter of the two; gain_long is
    (p' - p)/p', what it brings if it is the longer. Mind the denominators: they differ on purpose.
    """
    if rule == BY_LENGTH:
        if length[holder] >= length[challenger]:
            return not gain_long[holder] > gain_short[challenger]
        return gain_long[challenger] > gain_short[holder]
    if gain_long[challenger] >= gain_short[holder]:
        return True
    if gain_long[holder] >= gain_short[challenger]:
        return False
    if rule == BY_COIN:
        return coin(nonce, holder, challenger, gpus[holder], gpus[challenger])
    return rule == LAST


@njit(cache=True, inline="always")
def set_gains(
    i: int,
    share: int,
    cap: int,
    left: float,
    speeds: FloatArray,
    at: int,
    length: FloatArray,
    gain_short: FloatArray,
    gain_long: FloatArray,
) -> None:
    """A candidate's length and gains at this share; at its cap it takes no further part."""
    if share >= cap:
        length[i] = np.inf
        gain_short[i] = gain_long[i] = -np.inf
        return
    now, then = speeds[at + share], speeds[at + share + 1]
    length[i] = left / now
    gain_short[i] = (then - now) / now
    gain_long[i] = (then - now) / then


@njit(cache=True)
def hand_out(
    share: IntArray,
    rows: IntArray,
    remaining: FloatArray,
    speeds: FloatArray,
    at: IntArray,
    cap: IntArray,
    gpus: int,
    rule: int,
    nonce: int,
) -> None:
    """Hand out `gpus` one by one among `rows`, which all have a share, each to the winner of the fold."""
    m = len(rows)
    size = 1
    while size < m:
        size *= 2
    # Trees in arrays: leaf i is at size + i, the parent of k at k // 2.
    length, gain_short, gain_long = _tree(size, np.inf), _tree(size, -np.inf), _tree(size, -np.inf)
    held = np.zeros(2 * size, np.int32)
    alive = 0
    for i in range(m):
        r, k = rows[i], size + i
        held[k] = share[r]
        set_gains(k, held[k], cap[r], remaining[r], speeds, at[r], length, gain_short, gain_long)
        alive += held[k] < cap[r]
    for k in range(size - 1, 0, -1):
        _pull(k, length, gain_short, gain_long)
    chain = np.empty(m + 1, np.int32)  # leaves
    top = -1  # index of the chain's end
    first = size  # all candidates before this leaf are at their cap
    start = size  # where to look for the next one to beat the chain's end
    while gpus > 0 and alive > 0:
        if top < 0:
            while gain_short[first] == -np.inf:
                first += 1
            chain[0], top, start = first, 0, first + 1
        while start < size + m:  # extend the chain until nobody beats its end
            found = _next_to_beat(rule, nonce, length, gain_short, gain_long, held, size, start, chain[top])
            if found == 0:
                break
            top += 1
            chain[top], start = found, found + 1
        w = chain[top]
        r = rows[w - size]
        # The largest gain that any other could set against the winner's: its predecessor's, or that
        # of one after it.
        trouble = gain_short[chain[top - 1]] if top > 0 else -np.inf
        k = w
        while k > 1:
            if k % 2 == 0 and gain_short[k + 1] > trouble:
                trouble = gain_short[k + 1]
            k //= 2
        while True:
            held[w] += 1
            gpus -= 1
            set_gains(w, held[w], cap[r], remaining[r], speeds, at[r], length, gain_short, gain_long)
            if gpus == 0 or not gain_long[w] > trouble:
                break
        alive -= held[w] >= cap[r]
        k = w // 2
        while k > 0:
            _pull(k, length, gain_short, gain_long)
            k //= 2
        # All before the winner lost to its predecessor, and still do: go on from the winner itself.
        top -= 1
        start = w
    for i in range(m):
        share[rows[i]] = held[size + i]


@njit(cache=True, inline="always")
def _tree(size: int, empty: float) -> FloatArray:
    return np.full(2 * size, empty)


@njit(cache=True, inline="always")
def _pull(k: int, length: FloatArray, gain_short: FloatArray, gain_long: FloatArray) -> None:
    """A node carries the shortest length and the largest gains of its two children."""
    a, b = 2 * k, 2 * k + 1
    length[k] = length[a] if length[a] < length[b] else length[b]
    gain_short[k] = gain_short[a] if gain_short[a] > gain_short[b] else gain_short[b]
    gain_long[k] = gain_long[a] if gain_long[a] > gain_long[b] else gain_long[b]


@njit(cache=True, inline="always")
def _next_to_beat(
    rule: int,
    nonce: int,
    length: FloatArray,
    gain_short: FloatArray,
    gain_long: FloatArray,
    held: IntArray,
    size: int,
    start: int,
    holder: int,
) -> int:
    """The first leaf from `start` on that beats the holder; 0 if there is none."""
    span, short, long_ = length[holder], gain_short[holder], gain_long[holder]
    k = start
    while True:
        if rule == BY_LENGTH:
            may = gain_long[k] > short or (gain_short[k] >= long_ and length[k] <= span)
        else:
            may = gain_short[k] >= long_
        if may:
            if k < size:
                k *= 2
                continue
            if beats(rule, nonce, length, gain_short, gain_long, held, k, holder):
                return k
        while k % 2 == 1:  # done with this subtree: on to the next one to the right
            k //= 2
        if k == 0:
            return 0
        k += 1
