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


# Columns of a node of the tree: the shortest length and the largest gains of all below it.
_LENGTH, _SHORT, _LONG = 0, 1, 2


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
    # The tree in an array: leaf i is node size + i, the parent of node k is k // 2.
    tree = np.empty((2 * size, 4))
    tree[:, _LENGTH], tree[:, _SHORT], tree[:, _LONG] = np.inf, -np.inf, -np.inf
    held, limit = np.zeros(m, np.int32), np.empty(m, np.int32)
    begin, left = np.empty(m, np.int32), np.empty(m)
    alive = 0
    for i in range(m):
        r = rows[i]
        held[i], limit[i], begin[i], left[i] = share[r], cap[r], at[r], remaining[r]
        alive += held[i] < limit[i]
        _set_leaf(tree, size + i, held[i], limit[i], left[i], speeds, begin[i])
    for k in range(size - 1, 0, -1):
        _pull(tree, k)
    chain = np.empty(m + 1, np.int32)  # leaves
    top = -1  # index of the chain's end
    first = size  # all candidates before this leaf are at their cap
    start = size  # where to look for the next one to beat the chain's end
    while gpus > 0 and alive > 0:
        if top < 0:
            while tree[first, _SHORT] == -np.inf:
                first += 1
            chain[0], top, start = first, 0, first + 1
        while start < size + m:  # extend the chain until nobody beats its end
            found = _next_to_beat(tree, held, size, start, chain[top], rule, nonce)
            if found == 0:
                break
            top += 1
            chain[top], start = found, found + 1
        w = chain[top]
        i = w - size
        # The largest gain that any other could set against the winner's: its predecessor's, or that
        # of one after it. As long as the winner's is larger it wins again.
        trouble = tree[chain[top - 1], _SHORT] if top > 0 else -np.inf
        k = w
        while k > 1:
            if k & 1 == 0 and tree[k + 1, _SHORT] > trouble:
                trouble = tree[k + 1, _SHORT]
            k >>= 1
        while True:
            held[i] += 1
            gpus -= 1
            if gpus == 0 or held[i] >= limit[i]:
                break
            now, then = speeds[begin[i] + held[i]], speeds[begin[i] + held[i] + 1]
            if not (then - now) / then > trouble:
                break
        alive -= held[i] >= limit[i]
        _set_leaf(tree, w, held[i], limit[i], left[i], speeds, begin[i])
        k = w >> 1
        while k > 0:
            _pull(tree, k)
            k >>= 1
        # All before the winner lost to its predecessor, and still do: go on from the winner itself.
        top -= 1
        start = w
    for i in range(m):
        share[rows[i]] = held[i]


@njit(cache=True, inline="always")
def _set_leaf(
    tree: FloatArray, k: int, gpus: int, limit: int, left: float, speeds: FloatArray, at: int
) -> None:
    """A candidate's length and gains at its share; at its cap it takes no further part."""
    if gpus >= limit:
        tree[k, _LENGTH], tree[k, _SHORT], tree[k, _LONG] = np.inf, -np.inf, -np.inf
        return
    now, then = speeds[at + gpus], speeds[at + gpus + 1]
    tree[k, _LENGTH], tree[k, _SHORT], tree[k, _LONG] = left / now, (then - now) / now, (then - now) / then


@njit(cache=True, inline="always")
def _pull(tree: FloatArray, k: int) -> None:
    a, b = 2 * k, 2 * k + 1
    tree[k, _LENGTH] = min(tree[a, _LENGTH], tree[b, _LENGTH])
    tree[k, _SHORT] = max(tree[a, _SHORT], tree[b, _SHORT])
    tree[k, _LONG] = max(tree[a, _LONG], tree[b, _LONG])


@njit(cache=True, inline="always")
def _next_to_beat(
    tree: FloatArray, held: IntArray, size: int, start: int, holder: int, rule: int, nonce: int
) -> int:
    """The first leaf from `start` on that beats the holder; 0 if there is none.

    At a leaf the test is the rule itself; at an inner node it fails only if it fails for all below.
    """
    length, short, long_ = tree[holder, _LENGTH], tree[holder, _SHORT], tree[holder, _LONG]
    k = start
    while True:
        if tree[k, _SHORT] >= long_ and (
            rule != BY_LENGTH or tree[k, _LENGTH] <= length or tree[k, _LONG] > short
        ):
            if k < size:
                k *= 2
                continue
            if rule == BY_LENGTH or _wins_without_lengths(tree, held, size, k, holder, rule, nonce):
                return k
        while k & 1:  # done with this subtree: on to the next one to the right
            k >>= 1
        if k == 0:
            return 0
        k += 1


@njit(cache=True, inline="always")
def _wins_without_lengths(
    tree: FloatArray, held: IntArray, size: int, challenger: int, holder: int, rule: int, nonce: int
) -> bool:
    if tree[challenger, _LONG] >= tree[holder, _SHORT]:
        return True
    if tree[holder, _LONG] >= tree[challenger, _SHORT]:
        return False
    if rule == BY_COIN:
        return coin(nonce, holder - size, challenger - size, held[holder - size], held[challenger - size])
    return rule == LAST
