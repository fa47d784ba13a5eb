"""Looking ahead: how far users will be off their parts if jobs stay where they are, or if some go elsewhere.

Whether users can have their parts depends on which gangs share a node, and a wrong place shows only after many
quanta, and takes as many to make good. So the next quanta are played through by the rule that nodes follow when
users are behind (`sets`), for the jobs' places as they are and for changes of them: a rollout (Bertsekas &
Tsitsiklis, Neuro-Dynamic Programming, 1996).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from shoal.policies.fair.kernels import BoolArray, FloatArray, IntArray
from shoal.policies.fair.sets import full_set, reserve, worth_by_room

Ints = NDArray[np.int64]

#: How far ahead is looked: about as long as a moved job rests.
QUANTA = 30
#: Jobs move only where the furthest user is expected to be further off than this, in quanta of all GPUs, and the
#: outlook gets better by this part of it.
ENOUGH = 0.3
MIN_GAIN = 0.2
#: Quanta of nodes that are played through in one decision at most, some 20 to 50 ms; with gangs that span nodes each
#: counts for more.
MOST_WORK = 100_000
_SPANS_COUNT = 4


class Scene(NamedTuple):
    """Jobs of one GPU type and its nodes; rows from `small` on are gangs that span nodes."""

    user: IntArray
    size: IntArray
    small: int
    #: How many turns each row has waited, how many quanta a turn of it has, and how many turns it may wait.
    waited_turns: FloatArray
    turn_quanta: FloatArray
    patience_turns: float
    gpus_of_node: IntArray
    #: Of each user: what it had too little, in GPU quanta, its part in GPUs, and how much more it counts if behind.
    owed: FloatArray
    part: FloatArray
    urgency: FloatArray
    #: Row small + k takes span_gpus[j] of span_node[j], span_start[k] <= j < span_start[k + 1].
    span_start: IntArray
    span_node: IntArray
    span_gpus: IntArray


@njit(cache=True)
def _settle_in(where: IntArray, scene: Scene) -> tuple[Ints, Ints]:
    """(members, count): members[s, :count[s]] are the small rows of node s, by descending size."""
    nodes = len(scene.gpus_of_node)
    members, count = np.empty((nodes, scene.small + 1), np.int64), np.zeros(nodes, np.int64)
    for i in range(scene.small):
        _put(members[where[i]], count[where[i]], scene.size, i)
        count[where[i]] += 1
    return members, count


@njit(cache=True)
def _put(rows: Ints, n: int, size: IntArray, i: int) -> None:
    while n > 0 and size[rows[n - 1]] < size[i]:
        rows[n] = rows[n - 1]
        n -= 1
    rows[n] = i


@njit(cache=True)
def _move(members: Ints, count: Ints, size: IntArray, i: int, a: int, b: int) -> None:
    """Row i goes from node a to node b."""
    at = 0
    while members[a, at] != i:
        at += 1
    for k in range(at, count[a] - 1):
        members[a, k] = members[a, k + 1]
    count[a] -= 1
    _put(members[b], count[b], size, i)
    count[b] += 1


@njit(cache=True)
def outlook(where: IntArray, span_node: IntArray, scene: Scene, limit: float) -> float:
    """The mean square, over the next QUANTA, of how far off its part the furthest user is, in quanta of all GPUs.

    Ends early, with `limit`, when it cannot be below that any more.
    """
    user, size, gpus_of_node, part = scene.user, scene.size, scene.gpus_of_node, scene.part
    members, count = _settle_in(where, scene)
    nodes, users, n = len(count), len(part), len(user)
    where, owed, waited = where.copy(), scene.owed.copy(), scene.waited_turns.copy()
    gpus, parts, most = gpus_of_node.sum(), part.sum(), gpus_of_node.max()
    best, by_room = np.empty((n + 1, most + 1)), np.empty((nodes, most + 1))
    chosen, runs, worth = np.empty(n, np.bool_), np.zeros(n, np.bool_), np.empty(n)
    had, room = np.empty(users), np.empty(nodes, np.int64)
    total = 0.0
    for _ in range(QUANTA):
        for i in range(n):
            u = user[i]
            worth[i] = size[i] * owed[u] / part[u] * (scene.urgency[u] if owed[u] > 0.0 else 1.0)
            if waited[i] > scene.patience_turns:
                worth[i] += 1e6 * size[i] * waited[i]
        room[:] = gpus_of_node
        if n > scene.small:
            for s in range(nodes):
                worth_by_room(members[s], count[s], worth, size, room[s], best, by_room[s])
            _run_spans(worth, span_node, scene, room, by_room, runs)
        idle = 0
        for s in range(nodes):
            room[s] = full_set(members[s], count[s], worth, size, room[s], best, chosen)
            idle += room[s]
            for k in range(count[s]):
                runs[members[s, k]] = chosen[k]
        if idle > 0:
            _take_in(members, count, where, worth, scene, room, runs)
        had[:] = 0.0
        for i in range(n):
            waited[i] += 1.0 / scene.turn_quanta[i]
            if runs[i]:
                had[user[i]] += size[i]
                waited[i] = 0.0
        given, furthest = had.sum() / parts, 0.0
        for u in range(users):
            owed[u] += part[u] * given - had[u]
            furthest = max(furthest, abs(owed[u]))
        total += (furthest / gpus) ** 2
        if total >= limit * QUANTA:
            return limit
    return total / QUANTA


@njit(cache=True)
def _run_spans(
    worth: FloatArray, span_node: IntArray, scene: Scene, room: Ints, by_room: FloatArray, runs: BoolArray
) -> None:
    """Gangs that span nodes, by worth per GPU, run where that is worth more than what they keep out."""
    for i in scene.small + np.argsort(-worth[scene.small :] / scene.size[scene.small :], kind="mergesort"):
        a, b = scene.span_start[i - scene.small], scene.span_start[i - scene.small + 1]
        runs[i] = reserve(worth[i], span_node[a:b], scene.span_gpus[a:b], room, by_room)


@njit(cache=True)
def _take_in(
    members: Ints,
    count: Ints,
    where: IntArray,
    worth: FloatArray,
    scene: Scene,
    room: Ints,
    runs: BoolArray,
) -> None:
    """Idle GPUs take in waiting rows from anywhere, those of most worth per GPU first: see `balancer.attract`."""
    size = scene.size
    while True:
        best, largest, idle = -1, room.max(), room.sum()
        for i in range(len(runs)):
            if runs[i] or size[i] > (largest if i < scene.small else idle):
                continue
            if best < 0 or worth[i] / size[i] > worth[best] / size[best]:
                best = i
        if best < 0:
            return
        runs[best] = True
        if best >= scene.small:
            left = size[best]
            for s in range(len(room)):
                taken = min(left, room[s])
                room[s] -= taken
                left -= taken
            continue
        to = -1
        for s in range(len(room)):
            if room[s] >= size[best] and (to < 0 or room[s] < room[to]):
                to = s
        room[to] -= size[best]
        if where[best] != to:
            _move(members, count, size, best, where[best], to)
            where[best] = to


@njit(cache=True)
def better_places(
    where: IntArray, scene: Scene, movable: BoolArray, first: int, most_moves: int
) -> list[tuple[int, int, int]]:
    """(row, from node, to node): moves, each of which, or each two, make the outlook better by MIN_GAIN of it.

    None while the furthest user is expected to be off by less than ENOUGH. A gang that spans nodes changes one of
    them for another. No more steps are tried than MOST_WORK allows for, starting with row `first`.
    """
    where, span_node, movable = where.copy(), scene.span_node.copy(), movable.copy()
    moves = [(0, 0, 0) for _ in range(0)]
    now = outlook(where, span_node, scene, 1e300)
    work = QUANTA * len(scene.gpus_of_node) * (_SPANS_COUNT if scene.small < len(scene.user) else 1)
    tries = MOST_WORK // work
    while len(moves) < most_moves and now > ENOUGH * ENOUGH and tries > 0:
        left, limit = most_moves - len(moves), now * (1.0 - MIN_GAIN)
        now, i, j, at, to, tries = _best_step(where, span_node, scene, movable, first, left, limit, tries)
        if at >= 0:
            i = scene.small + np.searchsorted(scene.span_start, at, side="right") - 1
            moves.append((i, span_node[at], to))
            span_node[at] = to
        elif i >= 0:
            if j >= 0:
                moves.append((j, where[j], where[i]))
                where[j], movable[j] = where[i], False
            moves.append((i, where[i], to))
            where[i] = to
        else:
            break
        movable[i] = False
    return moves


@njit(cache=True)
def _best_step(
    where: IntArray,
    span_node: IntArray,
    scene: Scene,
    movable: BoolArray,
    first: int,
    most_moves: int,
    limit: float,
    tries: int,
) -> tuple[float, int, int, int, int, int]:
    """(outlook, row, row it changes places with, or place in `span_node`, to node, tries left); -1 for none."""
    best, best_i, best_j, best_at, best_to = limit, -1, -1, -1, -1
    size, gpus, small = scene.size, scene.gpus_of_node, scene.small
    for k in range(len(scene.span_start) - 1):
        a, b = scene.span_start[k], scene.span_start[k + 1]
        for at in range(a, b if movable[small + k] and tries > 0 else a):
            old = span_node[at]
            for s in range(len(gpus)):
                if gpus[s] < scene.span_gpus[at] or (span_node[a:b] == s).any():
                    continue
                span_node[at] = s
                found = outlook(where, span_node, scene, limit)
                tries -= 1
                if found < limit:
                    limit, best, best_at, best_to = found, found, at, s
                span_node[at] = old
    for exchange in (False, True):
        if exchange and (most_moves < 2 or tries <= 0):
            break
        if exchange and (best_i >= 0 or best_at >= 0):
            limit *= 1.0 - MIN_GAIN  # two moves are to gain more than one
        for k in range(small):
            i = (first + k) % small
            if tries <= 0 or not movable[i] or _like_one_before(i, where, scene, movable):
                continue
            a = where[i]
            for b in range(a + 1 if exchange else 0, len(gpus)):
                if b == a or gpus[b] < size[i]:
                    continue
                where[i] = b
                for j in range(small) if exchange else range(-1, 0):
                    if j >= 0 and not _may_change_places(i, j, a, b, where, scene, movable):
                        continue
                    if j >= 0:
                        where[j] = a
                    found = outlook(where, span_node, scene, limit)
                    tries -= 1
                    if found < limit:
                        limit, best, best_i, best_j, best_at, best_to = found, found, i, j, -1, b
                    if j >= 0:
                        where[j] = b
            where[i] = a
    return best, best_i, best_j, best_at, best_to, tries


@njit(cache=True)
def _may_change_places(
    i: int, j: int, a: int, b: int, where: IntArray, scene: Scene, movable: BoolArray
) -> bool:
    """Whether row j of node b can go to node a for row i, which stands on node b already, and is not like it."""
    if j == i or where[j] != b or not movable[j] or scene.size[j] > scene.gpus_of_node[a]:
        return False
    alike = scene.user[i] == scene.user[j] and scene.size[i] == scene.size[j]
    return not alike and not _like_one_before(j, where, scene, movable)


@njit(cache=True)
def _like_one_before(i: int, where: IntArray, scene: Scene, movable: BoolArray) -> bool:
    """Whether a row like this one, on the same node, comes before it."""
    for j in range(i):
        alike = scene.user[j] == scene.user[i] and scene.size[j] == scene.size[i]
        if alike and where[j] == where[i] and movable[j]:
            return True
    return False
