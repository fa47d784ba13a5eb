"""Which gangs run in one quantum: split stride with migration, then idle GPUs for waiting gangs."""

from __future__ import annotations

import numpy as np

from shoal.core.arrays import BoolArray, FloatArray, IntArray
from shoal.core.compiled import inner, kernel
from shoal.core.stable_order import stable_order
from shoal.policies.gandiva_fair.dues import rows_by_group
from shoal.policies.gandiva_fair.tables import NOWHERE, SPANS, Jobs, Nodes, Rows, Spans

#: (row, node, GPUs). A gang that spans nodes has several entries in a row.
Move = tuple[int, int, int]


@kernel
def split_stride(
    order: Rows,
    passed: FloatArray,
    jobs: Jobs,
    spans: Spans,
    nodes: Nodes,
    eligible: BoolArray,
    keep: BoolArray,
    behind: BoolArray,
    may_move: BoolArray,
    most_moves: int,
) -> tuple[BoolArray, IntArray, list[Move]]:
    """(rows that run, free GPUs of each node, migrations): `split_stride.SplitStride.pick`, with migration.

    `order` lists all rows by ascending pass. Rows in `keep` continue to run. Rows in `behind` are in the central
    order, like gangs that span nodes. If one of them does not fit where it is bound and is in `may_move`, it moves to
    other nodes of its GPU type. At most `most_moves` rows move.
    """
    free = nodes.gpus.copy()
    runs = keep.copy()
    moves = [(0, 0, 0) for _ in range(0)]
    for i in range(len(runs)):
        if keep[i]:
            _take(i, jobs, spans, free)
    # The central order: single gangs, then the aggregate of each node's other gangs, sorted by pass.
    key, entry, m = np.empty(len(order) + len(free)), np.empty(len(order) + len(free), np.int64), 0
    node = np.full(len(order), -1, np.int32)
    for k in range(len(order)):
        i = order[k]
        if not eligible[i] or keep[i] or jobs.home[i] == NOWHERE:
            continue
        if jobs.home[i] <= SPANS or behind[i]:
            key[m], entry[m] = passed[i], -1 - i
            m += 1
        else:
            node[k] = jobs.home[i]
    start, local = rows_by_group(node, len(free))
    for k in range(len(local)):
        local[k] = order[local[k]]
    for s in range(len(free)):
        if start[s + 1] > start[s]:
            key[m], entry[m] = _aggregate_pass(local[start[s] : start[s + 1]], passed, jobs.due), s
            m += 1
    moved = 0
    for e in stable_order(key[:m]):
        s = entry[e]
        if s >= 0:
            _run_node(local[start[s] : start[s + 1]], s, jobs.size, free, runs)
            continue
        i = -1 - s
        if _fits(i, jobs, spans, free):
            runs[i] = True
            _take(i, jobs, spans, free)
        elif may_move[i] and moved < most_moves and _move(i, jobs, spans, nodes, free, moves):
            runs[i] = True
            moved += 1
    return runs, free, moves


@inner
def _run_node(rows: Rows, s: int, size: IntArray, free: IntArray, runs: BoolArray) -> None:
    """Gang-aware stride on one node: gangs that fit run; others are skipped and keep their pass."""
    for i in rows:
        if size[i] <= free[s]:
            runs[i] = True
            free[s] -= size[i]


@inner
def _move(i: int, jobs: Jobs, spans: Spans, nodes: Nodes, free: IntArray, moves: list[Move]) -> bool:
    home = jobs.home[i]
    at = home if home >= 0 else spans.node[spans.start[SPANS - home]]
    return _place(i, nodes.gpu_type[at], home < 0, jobs, nodes, free, moves)


@inner
def _aggregate_pass(rows: Rows, passed: FloatArray, due: FloatArray) -> float:
    """The pass of a node's small jobs as one job: see `split_stride.aggregate_pass`."""
    tickets, service = 0.0, 0.0
    for i in rows:
        tickets += due[i]
        service += passed[i] * due[i]
    return service / tickets


@inner
def _fits(i: int, jobs: Jobs, spans: Spans, free: IntArray) -> bool:
    home = jobs.home[i]
    if home >= 0:
        return bool(free[home] >= jobs.size[i])
    fits = home <= SPANS
    if fits:
        for j in range(spans.start[SPANS - home], spans.start[SPANS - home + 1]):
            fits = fits and free[spans.node[j]] >= spans.gpus[j]
    return bool(fits)


@inner
def _take(i: int, jobs: Jobs, spans: Spans, free: IntArray) -> None:
    home = jobs.home[i]
    if home >= 0:
        free[home] -= jobs.size[i]
    elif home <= SPANS:
        for j in range(spans.start[SPANS - home], spans.start[SPANS - home + 1]):
            free[spans.node[j]] -= spans.gpus[j]


@inner
def _place(
    i: int, gpu_type: int, spans: bool, jobs: Jobs, nodes: Nodes, free: IntArray, moves: list[Move]
) -> bool:
    """Whether gang i fits on free GPUs of this type. If so, take them and append to `moves`.

    A small gang takes the node with the fewest free GPUs that holds it. A gang that spans nodes takes the nodes
    with the most free GPUs.
    """
    left, best = jobs.size[i], -1
    if spans:
        idle = 0
        for s in range(len(free)):
            idle += free[s] if nodes.gpu_type[s] == gpu_type else 0
        if idle < left:
            return False
    while left > 0:
        best = -1
        for s in range(len(free)):
            if nodes.gpu_type[s] != gpu_type or free[s] < (1 if spans else left):
                continue
            if best < 0 or (free[s] > free[best] if spans else free[s] < free[best]):
                best = s
        if best < 0:
            return False
        taken = min(left, free[best])
        moves.append((i, best, taken))
        free[best] -= taken
        left -= taken
    return True


@kernel
def fill_idle(
    order: Rows, waiting: BoolArray, speed: FloatArray, jobs: Jobs, nodes: Nodes, free: IntArray
) -> list[Move]:
    """Migrations of waiting rows to idle GPUs, by pass: small gangs first, then gangs that span nodes.

    A gang goes to the GPU type where it is fastest: `speed[type, row]`, 0 where it cannot run. After this no GPU is
    idle while a waiting gang fits on it.
    """
    moves = [(0, 0, 0) for _ in range(0)]
    types = speed.shape[0]
    # Per type, the largest gang that may still fit: on one node, and over all nodes.
    room = np.zeros((2, types), np.int64)
    for spans in (False, True):
        _measure_room(nodes, free, room)
        for i in order:
            if not waiting[i] or (jobs.home[i] <= SPANS) != spans:
                continue
            best = -1
            for t in range(types):
                fits = speed[t, i] > 0.0 and room[int(spans), t] >= jobs.size[i]
                if fits and (best < 0 or speed[t, i] > speed[best, i]):
                    best = t
            if best >= 0 and _place(i, best, spans, jobs, nodes, free, moves):
                _measure_room(nodes, free, room)
    return moves


@inner
def _measure_room(nodes: Nodes, free: IntArray, room: Rows) -> None:
    for t in range(room.shape[1]):
        room[0, t] = room[1, t] = 0
    for s in range(len(free)):
        t = nodes.gpu_type[s]
        room[0, t] = max(room[0, t], free[s])
        room[1, t] += free[s]


@kernel
def defragment(
    order: Rows,
    waiting: BoolArray,
    movable: BoolArray,
    most_moves: int,
    jobs: Jobs,
    nodes: Nodes,
    free: IntArray,
) -> list[Move]:
    """Migrations that make room on one node for a waiting gang where enough GPUs are idle on several nodes.

    As in Gandiva (Xiao et al., OSDI'18), running jobs of the node with the most free GPUs move to nodes with fewer.
    Gangs are tried by pass, at most `most_moves` of them. Rows that neither wait nor are `movable` stay.
    """
    moves = [(0, 0, 0) for _ in range(0)]
    tried = 0
    for i in order:
        if tried >= most_moves or len(moves) >= most_moves:
            break
        if not waiting[i] or jobs.home[i] < 0:
            continue
        high, idle = _most_free(nodes, nodes.gpu_type[jobs.home[i]], jobs.size[i], free)
        if high < 0 or idle < jobs.size[i]:
            continue
        tried += 1
        after, steps = free.copy(), [(0, 0, 0) for _ in range(0)]
        _clear(high, jobs.size[i], order, movable, jobs, nodes, after, steps)
        if after[high] >= jobs.size[i] and len(moves) + len(steps) < most_moves:
            steps.append((i, high, jobs.size[i]))
            after[high] -= jobs.size[i]
            free[:] = after
            for row, node, gpus in steps:
                moves.append((row, node, gpus))
                jobs.home[row] = node
                movable[row] = waiting[row] = False
    return moves


@inner
def _most_free(nodes: Nodes, gpu_type: int, size: int, free: IntArray) -> tuple[int, int]:
    """(the node of this type, of at least `size` GPUs, with the most free ones; free GPUs of the type in all)."""
    high, idle = -1, 0
    for s in range(len(free)):
        if nodes.gpu_type[s] == gpu_type:
            idle += free[s]
            if nodes.gpus[s] >= size and (high < 0 or free[s] > free[high]):
                high = s
    return high, idle


@inner
def _clear(
    high: int,
    size: int,
    order: Rows,
    movable: BoolArray,
    jobs: Jobs,
    nodes: Nodes,
    free: IntArray,
    steps: list[Move],
) -> None:
    """Move running jobs from node `high` to other nodes until `size` GPUs are free there, as far as possible."""
    for i in order:
        if free[high] >= size:
            break
        if jobs.home[i] != high or not movable[i]:
            continue
        kept, free[high] = free[high], 0  # so that the job is not placed on `high` again
        placed = _place(i, nodes.gpu_type[high], False, jobs, nodes, free, steps)
        free[high] = kept + (jobs.size[i] if placed else 0)
