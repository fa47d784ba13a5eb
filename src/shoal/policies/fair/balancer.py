"""Keeping the ticket load per GPU even over the nodes by migrating jobs, a few at a time.

Stride is fair on a node; for the cluster to be fair the nodes must carry equal loads,
ticketLoadPerGPU(s) = sum of the tickets of the jobs on s / GPUs of s (Gandiva_fair). Tickets are taken in
GPUs due, so a load of 1 is a node whose jobs are due just what it has.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from shoal.policies.fair.kernels import BoolArray, FloatArray, IntArray


@njit(cache=True)
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


@njit(cache=True)
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
    """Migrations (row, to node) that even the load out, within each GPU type; `home` is updated.

    Of the most and the least loaded node, move the job that leaves the smallest difference of their loads, if
    the difference shrinks by more than `min_gain`. Where the most loaded node has no such job the next one
    gets its turn. Rows that are not `movable` (moved a short while ago) stay. Every move makes the spread of
    its two nodes smaller and no more than `most_moves` are made, so this ends.
    """
    nodes, types = len(gpus_of_node), 0
    for s in range(nodes):
        types = max(types, type_of_node[s] + 1)
    load = ticket_load(tickets, home, gpus_of_node, active, spanning)
    moves = [(0, 0) for _ in range(0)]
    for t in range(types):
        settled = np.zeros(nodes, np.bool_)
        while len(moves) < most_moves:
            high, low = -1, -1
            for s in range(nodes):
                if type_of_node[s] == t and gpus_of_node[s] > 0:
                    if not settled[s] and (high < 0 or load[s] > load[high]):
                        high = s
                    if low < 0 or load[s] < load[low]:
                        low = s
            if high < 0 or load[high] - load[low] <= min_gain:
                break
            best, best_gap = -1, load[high] - load[low] - min_gain
            for i in range(len(home)):
                if home[i] == high and active[i] and movable[i] and size[i] <= gpus_of_node[low]:
                    gap = abs(
                        load[high]
                        - tickets[i] / gpus_of_node[high]
                        - load[low]
                        - tickets[i] / gpus_of_node[low]
                    )
                    if gap < best_gap:
                        best, best_gap = i, gap
            if best < 0:
                settled[high] = True
                continue
            load[high] -= tickets[best] / gpus_of_node[high]
            load[low] += tickets[best] / gpus_of_node[low]
            home[best] = low
            moves.append((best, low))
    return moves


@njit(cache=True)
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
