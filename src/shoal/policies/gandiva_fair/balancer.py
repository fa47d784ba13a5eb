"""Keeping the ticket load per GPU even over the nodes by migrating jobs, a few at a time.

Stride is fair on a node; for the cluster to be fair the nodes must carry equal loads,
ticketLoadPerGPU(s) = sum of the tickets of the jobs on s / GPUs of s (Gandiva_fair). Tickets are taken in
GPUs due, so a load of 1 is a node whose jobs are due just what it has. Beyond the paper, a node counts for more
than its load where its gangs cannot run beside each other: see `time_needed`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shoal.core.compiled import inner, kernel
from shoal.policies.gandiva_fair.kernels import BoolArray, FloatArray, IntArray, rows_by_group


@kernel
def ticket_load(
    tickets: FloatArray, home: IntArray, gpus_of_node: IntArray, active: BoolArray, spanning: FloatArray
) -> FloatArray:
    """Ticket load per GPU of every node; a node that is lost has none.

    `spanning` are the tickets that gangs over several nodes bring to each of them.
    """
    load = spanning.copy()
    for i in range(len(home)):
        if active[i] and home[i] >= 0:
            load[home[i]] += tickets[i]
    for s in range(len(load)):
        load[s] = load[s] / gpus_of_node[s] if gpus_of_node[s] > 0 else 0.0
    return load


@kernel
def time_needed(
    rows: NDArray[np.int64],
    tickets: FloatArray,
    size: IntArray,
    gpus: int,
    spanning: float,
    out: int,
    into: int,
) -> float:
    """The part of the time a node needs to give all its `rows` their due, without row `out`, with row `into`.

    It is never below the ticket load per GPU. But gangs larger than half the node run one after the other, each
    for tickets / size of the time, and a smaller job cannot run beside those that leave it no room.
    """
    by_size, longest = np.zeros(gpus + 2), np.zeros(gpus + 1)
    total = spanning
    for k in range(len(rows) + 1):
        i = rows[k] if k < len(rows) else into
        if i == out or i < 0:
            continue
        total += tickets[i]
        share = tickets[i] / size[i]
        by_size[size[i]] += share
        longest[size[i]] = max(longest[size[i]], share)
    needed, half = total / gpus, gpus // 2
    for k in range(gpus - 1, half, -1):
        by_size[k] += by_size[k + 1]
    needed = max(needed, by_size[half + 1])
    for k in range(1, half + 1):
        beside = by_size[gpus - k + 1]
        if longest[k] > 0.0 and beside > 0.0:
            needed = max(needed, longest[k] + beside)
    return needed


@kernel
def balance(
    tickets: FloatArray,
    size: IntArray,
    home: IntArray,
    gpus_of_node: IntArray,
    type_of_node: IntArray,
    movable: BoolArray,
    active: BoolArray,
    spanning: FloatArray,
    most_moves: int,
    min_gain: float,
) -> list[tuple[int, int]]:
    """Migrations (row, to node) that even out the time nodes need, within each GPU type; `home` is updated.

    From the node that needs most, move the job, or exchange the two jobs, that leave the larger need of both
    nodes smallest, if their difference shrinks by more than `min_gain`. Where there is none, the next node gets
    its turn. Rows that are not `movable` (moved a short while ago) stay. Every step makes the difference of its
    two nodes smaller and no more than `most_moves` are made, so this ends.
    """
    nodes, types = len(gpus_of_node), 0
    for s in range(nodes):
        types = max(types, type_of_node[s] + 1)
    where = home.copy()
    for i in range(len(where)):
        if not active[i]:
            where[i] = -1
    start, rows = rows_by_group(where, nodes)
    nobody = np.int64(-1)  # as a bare number it would have `time_needed` compiled once more
    need, load = np.zeros(nodes), ticket_load(tickets, home, gpus_of_node, active, spanning)
    for s in range(nodes):
        if gpus_of_node[s] > 0:
            need[s] = time_needed(
                rows[start[s] : start[s + 1]], tickets, size, gpus_of_node[s], spanning[s], nobody, nobody
            )
    moves = [(0, 0) for _ in range(0)]
    for t in range(types):
        settled = np.zeros(nodes, np.bool_)
        failed = 0
        while len(moves) < most_moves and failed < most_moves:
            high, low = -1, -1
            for s in range(nodes):
                if type_of_node[s] == t and gpus_of_node[s] > 0:
                    if not settled[s] and (high < 0 or need[s] > need[high]):
                        high = s
                    if low < 0 or need[s] < need[low]:
                        low = s
            if high < 0 or need[high] - need[low] <= min_gain:
                break
            swaps = len(moves) + 1 < most_moves
            a, b, other, need_high, need_other = _best_step(
                high,
                start,
                rows,
                tickets,
                size,
                gpus_of_node,
                type_of_node,
                movable,
                spanning,
                load,
                need,
                min_gain,
                swaps,
            )
            if a < 0:
                settled[high] = True
                failed += 1
                continue
            need[high], need[other] = need_high, need_other
            more = tickets[a] - (tickets[b] if b >= 0 else 0.0)
            load[high] -= more / gpus_of_node[high]
            load[other] += more / gpus_of_node[other]
            where[a] = home[a] = other
            moves.append((a, other))
            if b >= 0:
                where[b] = home[b] = high
                moves.append((b, high))
            start, rows = rows_by_group(where, nodes)
    return moves


@inner
def _best_step(
    high: int,
    start: NDArray[np.int64],
    rows: NDArray[np.int64],
    tickets: FloatArray,
    size: IntArray,
    gpus: IntArray,
    type_of_node: IntArray,
    movable: BoolArray,
    spanning: FloatArray,
    load: FloatArray,
    need: FloatArray,
    min_gain: float,
    swaps: bool,
) -> tuple[int, int, int, float, float]:
    """(row from `high`, row to it or -1, the other node, needs of both after it); -1 first if none helps."""
    best_a, best_b, best_s, best_high, best_other = -1, -1, -1, 0.0, 0.0
    # Both come nearer to each other by twice what the larger one falls.
    bound = need[high] - 0.5 * min_gain
    here = rows[start[high] : start[high + 1]]
    for exchange in (False, True):
        if exchange and (best_a >= 0 or not swaps):
            break
        for a in here:
            if not movable[a]:
                continue
            for s in range(len(gpus)):
                if (
                    s == high
                    or type_of_node[s] != type_of_node[high]
                    or gpus[s] < size[a]
                    or need[s] >= bound
                ):
                    continue
                there = rows[start[s] : start[s + 1]]
                for k in range(len(there) if exchange else 1):
                    b = there[k] if exchange else -1
                    if b >= 0 and (not movable[b] or size[b] > gpus[high]):
                        continue
                    most = bound if best_a < 0 else max(best_high, best_other) - 1e-12
                    more = tickets[a] - (tickets[b] if b >= 0 else 0.0)
                    # What is needed is never below the ticket load per GPU, which is known at once.
                    if load[high] - more / gpus[high] >= most or load[s] + more / gpus[s] >= most:
                        continue
                    left = time_needed(here, tickets, size, gpus[high], spanning[high], a, b)
                    if left >= most:
                        continue
                    right = time_needed(there, tickets, size, gpus[s], spanning[s], b, a)
                    if right < most:
                        best_a, best_b, best_s, best_high, best_other = a, b, s, left, right
    return best_a, best_b, best_s, best_high, best_other


@kernel
def attract(
    order: IntArray,
    size: IntArray,
    waiting: BoolArray,
    speed: FloatArray,
    type_of_node: IntArray,
    free: IntArray,
    home: IntArray,
) -> list[tuple[int, int]]:
    """Waiting jobs (row, to node) that idle GPUs elsewhere take in, by pass; updates `home` and `free`.

    A job goes where it is fastest, `speed[type, row]` (0: not at all), and there into the smallest gap that
    holds it. So no GPU idles while a gang that fits there waits somewhere else.
    """
    moves = [(0, 0) for _ in range(0)]
    largest = 0
    for s in range(len(free)):
        largest = max(largest, free[s])
    for i in order:
        if largest == 0:
            break
        if not waiting[i] or size[i] > largest:
            continue
        best = -1
        for s in range(len(free)):
            if free[s] < size[i] or speed[type_of_node[s], i] <= 0.0:
                continue
            if best < 0:
                best = s
                continue
            here, there = speed[type_of_node[s], i], speed[type_of_node[best], i]
            if here > there or (here == there and free[s] < free[best]):
                best = s
        if best < 0:
            continue
        full = free[best] == largest
        free[best] -= size[i]
        home[i] = best
        moves.append((i, best))
        if full:
            largest = 0
            for s in range(len(free)):
                largest = max(largest, free[s])
    return moves
