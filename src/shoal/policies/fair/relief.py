"""Relief for users and jobs that stride alone leaves behind, where jobs are bound to nodes.

Stride takes jobs one by one. Where a user's small job is due all of the time, it keeps its user's gang as large
as the node out for ever, and what is left of the node goes to users who are ahead: no order of one by one helps
the gang's user. Sets that are chosen as a whole do, and so does another node.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from shoal.policies.fair.kernels import BoolArray, FloatArray, IntArray, rows_by_group

#: A node with more GPUs is a pool, where gangs do not keep each other out.
MOST_GPUS = 64
#: A pass below this is that of a row that was put first.
FIRST = -1e5
#: Who has waited this many times its patience goes before everybody.
_LAST_PATIENCE = 1.6


@njit(cache=True)
def put_first(
    passed: FloatArray, waited_turns: FloatArray, patience_turns: float, far: BoolArray, full: BoolArray
) -> None:
    """Lower the passes of those who cannot wait, each class before the next:

    who has waited far beyond its patience, the longest first; `full`, jobs of users who are entitled to have
    all their jobs run all the time and had less, for they can never have more to make up for it; `far`, jobs of
    users who are far behind; who has waited beyond its patience.
    """
    for i in range(len(passed)):
        if waited_turns[i] > _LAST_PATIENCE * patience_turns:
            passed[i] -= 1e10 * waited_turns[i]
        elif full[i]:
            passed[i] -= 1e8
        elif far[i] or waited_turns[i] > patience_turns:
            passed[i] -= 1e6 if far[i] else 1e5 * waited_turns[i]


@njit(cache=True)
def choose_sets(
    order: NDArray[np.int64],
    passed: FloatArray,
    size: IntArray,
    home: IntArray,
    eligible: BoolArray,
    behind: BoolArray,
    runs: BoolArray,
    free: IntArray,
) -> None:
    """On nodes where a row that is `behind` waits, run the set with the lowest sum of size * pass.

    Weighing sets by what they do for those who are behind (max weight: Tassiulas & Ephremides 1992) gives
    everybody its due wherever some schedule does. What the set leaves is filled up in the order of passes.
    Updates `runs` and `free`.
    """
    nodes = len(free)
    urgent, node = np.zeros(nodes, np.bool_), np.full(len(order), -1, np.int32)
    for k in range(len(order)):
        i = order[k]
        if eligible[i] and home[i] >= 0:
            node[k] = home[i]
            urgent[home[i]] |= behind[i] and not runs[i]
    start, local = rows_by_group(node, nodes)
    for s in range(nodes):
        if urgent[s]:
            rows = order[local[start[s] : start[s + 1]]]
            room = _room(rows, size, runs, free[s])
            if room <= MOST_GPUS:
                free[s] = _run_set(rows, best_set(rows, passed, size, room), size, room, runs)


@njit(cache=True)
def take_in(
    order: NDArray[np.int64],
    passed: FloatArray,
    size: IntArray,
    home: IntArray,
    gpu_type: IntArray,
    type_of_node: IntArray,
    gpus_of_node: IntArray,
    eligible: BoolArray,
    moving: BoolArray,
    most: int,
    runs: BoolArray,
    free: IntArray,
) -> list[tuple[int, int]]:
    """(row, to node): waiting rows that are `moving` go, and run, where they push out those who need it least.

    What a set of jobs is worth is its sum of -size * pass; a move must gain, and a node takes in one row at
    most. Updates `home`, `runs` and `free`.
    """
    moves = [(0, 0) for _ in range(0)]
    nodes = len(free)
    node = np.full(len(order), -1, np.int32)
    for k in range(len(order)):
        if runs[order[k]] and eligible[order[k]]:
            node[k] = home[order[k]]
    start, local = rows_by_group(node, nodes)
    taken, tried = np.zeros(nodes, np.bool_), 0
    for i in order:
        if len(moves) >= most or tried >= 4 * most:  # the first in the order need it most: leave the rest
            break
        if runs[i] or not moving[i] or home[i] < 0:
            continue
        tried += 1
        best, best_gain = -1, 0.0
        for s in range(nodes):
            if s == home[i] or taken[s] or type_of_node[s] != gpu_type[i] or gpus_of_node[s] < size[i]:
                continue
            rows = order[local[start[s] : start[s + 1]]]
            room = _room(rows, size, runs, free[s])
            if size[i] <= room <= MOST_GPUS:
                gain = -size[i] * passed[i]
                stay = best_set(rows, passed, size, room - size[i])
                for k in range(len(rows)):
                    if not stay[k]:
                        gain += size[rows[k]] * passed[rows[k]]
                if gain > best_gain:
                    best, best_gain = s, gain
        if best >= 0:
            rows = order[local[start[best] : start[best + 1]]]
            room = _room(rows, size, runs, free[best]) - size[i]
            free[best] = _run_set(rows, best_set(rows, passed, size, room), size, room, runs)
            runs[i], home[i], taken[best] = True, best, True
            moves.append((i, best))
    return moves


@njit(cache=True)
def best_set(rows: NDArray[np.int64], passed: FloatArray, size: IntArray, room: int) -> BoolArray:
    """Of the sets of `rows` that fit in `room` GPUs the one with the largest sum of -size * pass."""
    n = len(rows)
    best = np.zeros((n + 1, room + 1))
    for k in range(n):
        gpus, worth = size[rows[k]], -size[rows[k]] * passed[rows[k]]
        for c in range(room + 1):
            best[k + 1, c] = best[k, c]
            if gpus <= c and best[k, c - gpus] + worth > best[k + 1, c]:
                best[k + 1, c] = best[k, c - gpus] + worth
    chosen = np.zeros(n, np.bool_)
    for k in range(n - 1, -1, -1):
        if best[k + 1, room] > best[k, room]:
            chosen[k] = True
            room -= size[rows[k]]
    return chosen


@njit(cache=True)
def _room(rows: NDArray[np.int64], size: IntArray, runs: BoolArray, free: int) -> int:
    """GPUs that these rows hold, with those that are free."""
    for i in rows:
        if runs[i]:
            free += size[i]
    return free


@njit(cache=True)
def _run_set(rows: NDArray[np.int64], chosen: BoolArray, size: IntArray, room: int, runs: BoolArray) -> int:
    """Run these of the rows and, in their order, others that fit beside them; the GPUs left."""
    for k in range(len(rows)):
        runs[rows[k]] = chosen[k]
        if chosen[k]:
            room -= size[rows[k]]
    for i in rows:
        if not runs[i] and size[i] <= room:
            runs[i] = True
            room -= size[i]
    return room
