"""The tournament of AFS-L: who gets the next GPU, one GPU after the other, in few comparisons.

Each GPU goes to the winner of a left fold over the candidates in order of submission: the first job holds,
and each further one takes over if it beats the holder. The relation is not transitive, so the order of the
fold is part of the rule, and no sorting can replace it. What makes it quick and still exact:

- The holders form a chain, each the first job after its predecessor that beats it. A grant changes only
  the winner, which is the chain's end, so the chain before it stands.
- The next job that beats a holder is found in a tree over blocks of jobs whose nodes carry the best values
  below them.
- Nobody beats most holders because the many with gains like theirs are longer and the shorter ones gain
  less. So nodes also carry the shortest length among those whose gain reaches a bar, which follows the
  holders' gains down as they sink; it is set anew when the searches since have looked at too many in vain.
- A search leaves behind the largest gains that were set against the holder. As long as a winner stays
  above them, and beats its predecessor, it wins again without a search.
- Where all fit at their caps there is nothing to decide.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from shoal.policies.base import FloatArray, IntArray

# Columns of a leaf, and of a node of the tree: the shortest length and the largest gains of all below it,
# and the shortest length of those whose gain as the shorter job reaches the bar.
_LENGTH, _SHORT, _LONG, _ABOVE = 0, 1, 2, 3
#: A new bar is set this far below the gain of the holder that asked for it.
_BAR = 0.99
#: Leaves in a block: few enough to look at one by one, enough to keep the tree low.
_BLOCK = 4


@njit(cache=True)
def hand_out(
    share: IntArray,
    remaining: FloatArray,
    speeds: FloatArray,
    at: IntArray,
    cap: IntArray,
    gpus: int,
) -> None:
    """Hand out `gpus` one by one among those that have a share below their cap, each to the winner of the fold."""
    rows, m = np.empty(len(share), np.int32), 0
    for r in range(len(share)):
        if 0 < share[r] < cap[r]:
            rows[m] = r
            m += 1
    if m == 0:
        return
    held, limit = np.empty(m, np.int32), np.empty(m, np.int32)
    begin, left = np.empty(m, np.int32), np.empty(m)
    need = 0
    for i in range(m):
        r = rows[i]
        held[i], limit[i], begin[i], left[i] = share[r], cap[r], at[r], remaining[r]
        need += limit[i] - held[i]
    if need <= gpus:
        for i in range(m):
            share[rows[i]] = limit[i]
        return
    leaves, tree, blocks = _plant(held, limit, left, speeds, begin)
    bar, in_vain = np.inf, 0
    chain = np.empty(m + 1, np.int32)
    top = -1  # index of the chain's end
    # For each of the chain: the largest gains set against it by those after it, up to where it was searched.
    rivals = np.empty((m + 1, 2))
    first = 0  # all candidates before this one are at their cap
    start = 0  # where to look for the next one to beat the chain's end
    while gpus > 0:
        if top < 0:
            while leaves[first, _SHORT] == -np.inf:
                first += 1
            chain[0], top, start = first, 0, first + 1
            rivals[0, 0] = rivals[0, 1] = -np.inf
        while start < m:  # extend the chain until nobody beats its end
            found, short, long_, looked_at = _next_to_beat(leaves, tree, blocks, start, chain[top], bar)
            in_vain += looked_at
            if found < 0 and in_vain > m:
                bar, in_vain = leaves[chain[top], _LONG] * _BAR, 0
                _pull_all(leaves, tree, blocks, bar)
            rivals[top, 0], rivals[top, 1] = max(rivals[top, 0], short), max(rivals[top, 1], long_)
            if found < 0:
                break
            top += 1
            chain[top], start = found, found + 1
            rivals[top, 0] = rivals[top, 1] = -np.inf
        w = chain[top]
        rival_short, rival_long = rivals[top, 0], rivals[top, 1]
        length_before, short_before, long_before = np.inf, -np.inf, -np.inf
        if top > 0:
            before = chain[top - 1]
            length_before = leaves[before, _LENGTH]
            short_before, long_before = leaves[before, _SHORT], leaves[before, _LONG]
        was = speeds[begin[w] + held[w]]
        while True:
            held[w] += 1
            gpus -= 1
            if gpus == 0 or held[w] >= limit[w]:
                break
            now, then = speeds[begin[w] + held[w]], speeds[begin[w] + held[w] + 1]
            short, long_ = (then - now) / now, (then - now) / then
            # A winner that is no slower than before is no longer than before, so nobody who was longer has
            # become a shorter rival.
            if now < was or not (long_ > rival_short and short >= rival_long):
                break
            if not long_ > short_before and not (short >= long_before and left[w] / now <= length_before):
                break
        _set_leaf(leaves, w, held[w], limit[w], left[w], speeds, begin[w])
        _lift(leaves, tree, blocks, w // _BLOCK, bar)
        # All before the winner lost to its predecessor, and still do: go on from the winner itself.
        top -= 1
        start = w
    for i in range(m):
        share[rows[i]] = held[i]


@njit(cache=True, inline="always")
def _plant(
    held: IntArray, limit: IntArray, left: FloatArray, speeds: FloatArray, begin: IntArray
) -> tuple[FloatArray, FloatArray, int]:
    """The leaves, one per candidate, and the tree over their blocks: block b is node `blocks + b`."""
    m = len(held)
    blocks = 1
    while blocks * _BLOCK < m:
        blocks *= 2
    leaves, tree = np.empty((blocks * _BLOCK, 4)), np.empty((2 * blocks, 4))
    leaves[:, _LENGTH], leaves[:, _SHORT], leaves[:, _LONG] = np.inf, -np.inf, -np.inf
    for i in range(m):
        _set_leaf(leaves, i, held[i], limit[i], left[i], speeds, begin[i])
    _pull_all(leaves, tree, blocks, np.inf)
    return leaves, tree, blocks


@njit(cache=True)
def _pull_all(leaves: FloatArray, tree: FloatArray, blocks: int, bar: float) -> None:
    for b in range(blocks):
        _pull_block(tree, blocks + b, leaves, b * _BLOCK, bar)
    for k in range(blocks - 1, 0, -1):
        _pull(tree, k)


@njit(cache=True, inline="always")
def _set_leaf(
    leaves: FloatArray, i: int, gpus: int, limit: int, left: float, speeds: FloatArray, at: int
) -> None:
    """A candidate's length and gains at its share; at its cap it takes no further part."""
    if gpus >= limit:
        leaves[i, _LENGTH], leaves[i, _SHORT], leaves[i, _LONG] = np.inf, -np.inf, -np.inf
        return
    now, then = speeds[at + gpus], speeds[at + gpus + 1]
    leaves[i, _LENGTH] = left / now
    leaves[i, _SHORT], leaves[i, _LONG] = (then - now) / now, (then - now) / then


@njit(cache=True, inline="always")
def _pull_block(tree: FloatArray, k: int, leaves: FloatArray, begin: int, bar: float) -> bool:
    """Set node k from the leaves of its block; whether that changed anything."""
    length, short, long_, above = np.inf, -np.inf, -np.inf, np.inf
    for i in range(begin, begin + _BLOCK):
        length = min(length, leaves[i, _LENGTH])
        above = min(above, leaves[i, _LENGTH] if leaves[i, _SHORT] >= bar else np.inf)
        short = max(short, leaves[i, _SHORT])
        long_ = max(long_, leaves[i, _LONG])
    return _set_node(tree, k, length, short, long_, above)


@njit(cache=True, inline="always")
def _pull(tree: FloatArray, k: int) -> bool:
    """Set node k from the two below it; whether that changed anything."""
    a, b = 2 * k, 2 * k + 1
    return _set_node(
        tree,
        k,
        min(tree[a, _LENGTH], tree[b, _LENGTH]),
        max(tree[a, _SHORT], tree[b, _SHORT]),
        max(tree[a, _LONG], tree[b, _LONG]),
        min(tree[a, _ABOVE], tree[b, _ABOVE]),
    )


@njit(cache=True, inline="always")
def _set_node(tree: FloatArray, k: int, length: float, short: float, long_: float, above: float) -> bool:
    same = tree[k, _LENGTH] == length and tree[k, _SHORT] == short
    same &= tree[k, _LONG] == long_ and tree[k, _ABOVE] == above
    tree[k, _LENGTH], tree[k, _SHORT], tree[k, _LONG], tree[k, _ABOVE] = length, short, long_, above
    return not same


@njit(cache=True, inline="always")
def _lift(leaves: FloatArray, tree: FloatArray, blocks: int, b: int, bar: float) -> None:
    """Bring the nodes above a block up to date, as far up as it makes a difference."""
    k = blocks + b
    changed = _pull_block(tree, k, leaves, b * _BLOCK, bar)
    k >>= 1
    while changed and k > 0:
        changed = _pull(tree, k)
        k >>= 1


@njit(cache=True, inline="always")
def _next_to_beat(
    leaves: FloatArray, tree: FloatArray, blocks: int, start: int, holder: int, bar: float
) -> tuple[int, float, float, int]:
    """The first candidate from `start` on that beats the holder, or -1.

    Then the largest gains set against the holder so far: as the shorter job, of those that are not longer,
    and as the longer job, of all; and how many the tree made it look at. A node's values fail the test only if
    those of all below it fail.
    """
    length, short, long_ = leaves[holder, _LENGTH], leaves[holder, _SHORT], leaves[holder, _LONG]
    rival_short, rival_long, in_vain = -np.inf, -np.inf, 0
    begin, k = start, blocks + start // _BLOCK
    while True:
        for i in range(begin, (k - blocks + 1) * _BLOCK):
            if leaves[i, _LENGTH] <= length:
                if leaves[i, _SHORT] >= long_:
                    return i, rival_short, rival_long, in_vain
                rival_short = max(rival_short, leaves[i, _SHORT])
            elif leaves[i, _LONG] > short:
                return i, rival_short, rival_long, in_vain
            rival_long = max(rival_long, leaves[i, _LONG])
        while True:  # on to the next block whose values pass the test
            while k & 1:
                k >>= 1
            if k == 0:
                return -1, rival_short, rival_long, in_vain
            k += 1
            while True:
                barred = False
                passes = tree[k, _SHORT] >= long_ and (tree[k, _LENGTH] <= length or tree[k, _LONG] > short)
                if passes and bar <= long_ and tree[k, _ABOVE] > length and tree[k, _LONG] <= short:
                    passes, barred = False, True  # all that reach the bar are longer
                if k >= blocks or not passes:
                    break
                k *= 2
            if passes:
                break
            if tree[k, _LENGTH] <= length:
                rival_short = max(rival_short, bar if barred else tree[k, _SHORT])
            rival_long = max(rival_long, tree[k, _LONG])
        begin = (k - blocks) * _BLOCK
        in_vain += _BLOCK
