"""Relief for users and jobs that stride alone leaves behind, where jobs are bound to nodes.

Stride takes jobs one by one. Where a user's small job is due all of the time, it keeps its user's gang as large
as the node out for ever, and what is left of the node goes to users who are ahead: no order of one by one helps
the gang's user. Sets that are chosen as a whole do, and so does another node.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shoal.core.compiled import inner, kernel
from shoal.policies.gandiva_fair.kernels import NOWHERE, SPANS, BoolArray, FloatArray, IntArray, rows_by_group
from shoal.policies.gandiva_fair.sets import by_size, full_set, reserve, worth_by_room

#: A node with more GPUs is a pool, where gangs do not keep each other out.
MOST_GPUS = 64
#: A pass below this is that of a row that was put first.
FIRST = -1e9


@kernel
def put_first(passed: FloatArray, waited_turns: FloatArray, patience_turns: float) -> None:
    """Lower the passes of those who have waited beyond their patience below all others, the longest wait first."""
    for i in range(len(passed)):
        if waited_turns[i] > patience_turns:
            passed[i] -= 1e10 * waited_turns[i]


@kernel
def choose_sets(
    order: NDArray[np.int64],
    passed: FloatArray,
    size: IntArray,
    home: IntArray,
    span_start: IntArray,
    span_node: IntArray,
    span_gpus: IntArray,
    gpus_of_node: IntArray,
    eligible: BoolArray,
    behind: BoolArray,
    runs: BoolArray,
    free: IntArray,
) -> None:
    """On nodes where a row that is `behind` waits, run the full set with the lowest sum of size * pass.

    So do nodes that have gangs that span nodes, which run where that makes the sum lower. Updates `runs` and `free`.
    """
    nodes, n = len(free), len(order)
    urgent, node, spans, any_urgent = np.zeros(nodes, np.bool_), np.full(n, -1, np.int32), 0, False
    for k in range(n):
        i = order[k]
        if eligible[i] and home[i] >= 0:
            node[k] = home[i]
            urgent[home[i]] |= behind[i] and not runs[i]
        if eligible[i] and home[i] != NOWHERE and behind[i] and not runs[i]:
            any_urgent = True
        if eligible[i] and home[i] <= SPANS:
            spans += 1
    if not any_urgent:
        return
    start, local = rows_by_group(node, nodes)
    most, longest = 0, 0
    for s in range(nodes):
        most = max(most, min(gpus_of_node[s], MOST_GPUS))
        longest = max(longest, start[s + 1] - start[s])
    for k in range(len(local)):
        local[k] = order[local[k]]
    worth, room = np.empty(len(passed)), np.empty(nodes, np.int64)
    for i in range(len(passed)):
        worth[i] = -size[i] * passed[i]
    for s in range(nodes):
        room[s] = _room(local[start[s] : start[s + 1]], size, runs, free[s])
    best, chosen = np.empty((longest + 1, most + 1)), np.empty(longest, np.bool_)
    if spans > 0:
        _choose_spans(
            order,
            worth,
            size,
            home,
            span_start,
            span_node,
            span_gpus,
            gpus_of_node,
            eligible,
            start,
            local,
            urgent,
            runs,
            room,
            best,
        )
    for s in range(nodes):
        if urgent[s] and gpus_of_node[s] <= MOST_GPUS:
            rows = local[start[s] : start[s + 1]].copy()
            by_size(rows, len(rows), size)
            free[s] = full_set(rows, len(rows), worth, size, room[s], best, chosen)
            for k in range(len(rows)):
                runs[rows[k]] = chosen[k]


@inner
def _choose_spans(
    order: NDArray[np.int64],
    worth: FloatArray,
    size: IntArray,
    home: IntArray,
    span_start: IntArray,
    span_node: IntArray,
    span_gpus: IntArray,
    gpus_of_node: IntArray,
    eligible: BoolArray,
    start: NDArray[np.int64],
    local: NDArray[np.int64],
    urgent: BoolArray,
    runs: BoolArray,
    room: NDArray[np.int64],
    best: FloatArray,
) -> None:
    by_room, anew = np.empty((len(room), best.shape[1])), np.zeros(len(order), np.bool_)
    for i in order:
        if eligible[i] and home[i] <= SPANS:
            k = SPANS - home[i]
            ok = True
            for j in range(span_start[k], span_start[k + 1]):
                ok &= gpus_of_node[span_node[j]] <= MOST_GPUS
            if ok:
                for j in range(span_start[k], span_start[k + 1]):
                    urgent[span_node[j]] = True
                    if runs[i]:
                        room[span_node[j]] += span_gpus[j]
                runs[i], anew[i] = False, True
    for s in range(len(room)):
        if urgent[s] and gpus_of_node[s] <= MOST_GPUS:
            rows = local[start[s] : start[s + 1]].copy()
            by_size(rows, len(rows), size)
            worth_by_room(rows, len(rows), worth, size, room[s], best, by_room[s])
    for i in order:
        if anew[i]:
            k = SPANS - home[i]
            a, b = span_start[k], span_start[k + 1]
            runs[i] = reserve(worth[i], span_node[a:b], span_gpus[a:b], room, by_room)


@kernel
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


@kernel
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


@inner
def _room(rows: NDArray[np.int64], size: IntArray, runs: BoolArray, free: int) -> int:
    """GPUs that these rows hold, with those that are free."""
    for i in rows:
        if runs[i]:
            free += size[i]
    return free


@inner
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
