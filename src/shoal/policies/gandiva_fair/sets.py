"""Sets of gangs that run together: of those that leave no GPU idle that another could use, the one of most worth.

Stride takes jobs one by one. Choosing sets as a whole, by what they are worth to those who are behind, gives
everybody its due wherever some schedule does (max weight: Tassiulas & Ephremides 1992).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shoal.core.compiled import inner, kernel
from shoal.policies.gandiva_fair.kernels import BoolArray, FloatArray, IntArray

Rows = NDArray[np.int64]

NONE = -1e300


@kernel
def by_size(rows: Rows, n: int, size: IntArray) -> None:
    """Sort rows[:n] by descending size; equals stay in their order."""
    for k in range(1, n):
        i = rows[k]
        j = k
        while j > 0 and size[rows[j - 1]] < size[i]:
            rows[j] = rows[j - 1]
            j -= 1
        rows[j] = i


@inner
def _fill_table(rows: Rows, n: int, worth: FloatArray, size: IntArray, room: int, best: FloatArray) -> None:
    """best[k, c]: the largest worth of a set of the first k of `rows` that takes exactly c GPUs."""
    best[0, 0] = 0.0
    for c in range(1, room + 1):
        best[0, c] = NONE
    for k in range(n):
        gpus, gain = size[rows[k]], worth[rows[k]]
        for c in range(room + 1):
            value = best[k, c]
            if gpus <= c and best[k, c - gpus] + gain > value:
                value = best[k, c - gpus] + gain
            best[k + 1, c] = value


@inner
def _best_end(
    rows: Rows, n: int, worth: FloatArray, size: IntArray, room: int, best: FloatArray
) -> tuple[float, int, int]:
    """(worth, k, GPUs left) of the best full set in `room`: rows[k:] run, and a set of the first k.

    A set is full if it leaves room for no other row: where f GPUs are left, all rows of at most f run. `rows` are
    by descending size.
    """
    top, at, left = 0.1 * NONE, 0, 0
    small, small_worth = 0, 0.0
    for k in range(n, -1, -1):
        if k < n:
            small += size[rows[k]]
            small_worth += worth[rows[k]]
        if small > room:
            break
        last = size[rows[k - 1]] - 1 if k > 0 else room
        for f in range(size[rows[k]] if k < n else 0, min(last, room - small) + 1):
            value = best[k, room - f - small] + small_worth
            if value > top:
                top, at, left = value, k, f
    return top, at, left


@kernel
def full_set(
    rows: Rows, n: int, worth: FloatArray, size: IntArray, room: int, best: FloatArray, chosen: BoolArray
) -> int:
    """Mark in `chosen` which of `rows[:n]`, by descending size, are the full set of most worth; the GPUs left."""
    total = 0
    for k in range(n):
        total += size[rows[k]]
    if total <= room:
        for k in range(n):
            chosen[k] = True
        return room - total
    _fill_table(rows, n, worth, size, room, best)
    _, at, left = _best_end(rows, n, worth, size, room, best)
    c = room - left
    for k in range(n - 1, -1, -1):
        chosen[k] = k >= at or best[k + 1, c] > best[k, c]
        if chosen[k]:
            c -= size[rows[k]]
    return left


@kernel
def worth_by_room(
    rows: Rows, n: int, worth: FloatArray, size: IntArray, room: int, best: FloatArray, out: FloatArray
) -> None:
    """out[c], c <= room: what the best full set in c GPUs is worth."""
    _fill_table(rows, n, worth, size, room, best)
    for c in range(room + 1):
        out[c] = _best_end(rows, n, worth, size, c, best)[0]


@kernel
def reserve(
    worth: float, nodes: IntArray, gpus: IntArray, room: NDArray[np.int64], by_room: FloatArray
) -> bool:
    """Whether a gang that takes gpus[j] of nodes[j] is worth more than what it keeps out; `room` is updated."""
    for j in range(len(nodes)):
        if room[nodes[j]] < gpus[j]:
            return False
        s = nodes[j]
        worth -= by_room[s, room[s]] - by_room[s, room[s] - gpus[j]]
    if worth <= 0.0:
        return False
    for j in range(len(nodes)):
        room[nodes[j]] -= gpus[j]
    return True
