"""Another set of gangs where the one that passes choose would take a user too far off its part.

Passes weigh what jobs had, not what they are about to have: a gang as large as several nodes gives its user more in
one quantum than all others can make good in many. So before a quantum begins, what users would have by its end is
counted; where one would be too far off, that set of gangs runs, on all nodes at once, by which the furthest are least
far off (as in Tijdeman's chairman assignment, 1980, nobody is taken further ahead than others can bear).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from shoal.policies.fair.kernels import BoolArray, FloatArray, IntArray
from shoal.policies.fair.outlook import Ints, Scene
from shoal.policies.fair.sets import by_size, full_set

#: How far off a user may be after the quantum, in quanta of all GPUs, before another set is looked for.
LIMIT = 0.7
#: Where a user is further off than this, not all can have their parts: sets then go by weight alone.
LOST = 2.0
#: Distances count to this power, so that the furthest count most.
_POWER = 6
#: How often the sets of all nodes are chosen again, as users have what they have on all of them together.
_SWEEPS = 3
#: How many gangs that span nodes begin, end or change their nodes at most; and what a change of nodes must gain.
_STEPS = 4
_MIN_GAIN = 0.1
#: Whose being behind counts for more than this can hardly make up for it: see `accounts.urgency`.
_HARDLY = 5.0
#: How many rows that have waited long are tried to run in one quantum; the longest wait comes first.
_MOST_PRESSED = 8


#: A span keeps its nodes, or may have any; else it leaves this one.
_STAY, _ANYWHERE = -2, -1


class Choice(NamedTuple):
    """Who runs, the GPUs left on each node, the nodes of small rows, and what each span takes of each node."""

    runs: BoolArray
    free: Ints
    where: IntArray
    place: Ints


@njit(cache=True)
def places(scene: Scene) -> Ints:
    """[span, node]: GPUs."""
    out = np.zeros((len(scene.span_start) - 1, len(scene.gpus_of_node)), np.int64)
    for k in range(len(out)):
        for j in range(scene.span_start[k], scene.span_start[k + 1]):
            out[k, scene.span_node[j]] = scene.span_gpus[j]
    return out


@njit(cache=True)
def _copy(choice: Choice) -> Choice:
    return Choice(choice.runs.copy(), choice.free.copy(), choice.where.copy(), choice.place.copy())


# -- what users will have ------------------------------------------------------------------------------


@njit(cache=True)
def _off(scene: Scene, had: FloatArray) -> FloatArray:
    """What users are owed after a quantum in which they have `had` GPUs, in quanta of all GPUs."""
    return (scene.owed + scene.part * (had.sum() / scene.part.sum()) - had) / scene.gpus_of_node.sum()


@njit(cache=True)
def _had(scene: Scene, rank: Ints, choice: Choice) -> FloatArray:
    """GPUs users will have if these rows run, and idle GPUs take in others as `Binding.attract` does, by `rank`."""
    had, room = np.zeros(len(scene.part)), choice.free.copy()
    for i in range(len(choice.runs)):
        if choice.runs[i]:
            had[scene.user[i]] += scene.size[i]
    for spans in (False, True):
        for i in rank:
            if room.sum() == 0:
                return had
            if choice.runs[i] or (i >= scene.small) != spans:
                continue
            left = scene.size[i]
            if left > (room.sum() if spans else room.max()):
                continue
            to = -1
            for s in range(len(room)):
                if spans:
                    taken = min(left, room[s])
                    room[s] -= taken
                    left -= taken
                elif room[s] >= left and (to < 0 or room[s] < room[to]):
                    to = s
            if not spans:
                room[to] -= left
            had[scene.user[i]] += scene.size[i]
    return had


# -- other choices ---------------------------------------------------------------------------------------


@njit(cache=True)
def _take(scene: Scene, choice: Choice, i: int, runs: bool) -> None:
    """Row i runs from now on, or does not."""
    choice.runs[i] = runs
    sign = 1 if runs else -1
    if i < scene.small:
        choice.free[choice.where[i]] -= sign * scene.size[i]
    else:
        for s in range(len(choice.free)):
            choice.free[s] -= sign * choice.place[i - scene.small, s]


@njit(cache=True)
def _make_way(scene: Scene, must: BoolArray, choice: Choice, i: int) -> bool:
    """Whether row i can run where it is bound, which it then does; gangs that span nodes and keep it out do not."""
    _take(scene, choice, i, True)
    for other in range(scene.small, len(choice.runs)):
        in_way = ((choice.free < 0) & (choice.place[other - scene.small] > 0)).any()
        if in_way and other != i and choice.runs[other] and not must[other]:
            _take(scene, choice, other, False)
    return bool(choice.free.min() >= 0)


@njit(cache=True)
def _replace(scene: Scene, choice: Choice, i: int, avoid: int) -> bool:
    """Whether row i, which spans nodes, can run without node `avoid`; then it does, where most GPUs are free."""
    if choice.runs[i]:
        _take(scene, choice, i, False)
    place, left = choice.place[i - scene.small], scene.size[i]
    place[:] = 0
    while left > 0:
        to = -1
        for s in range(len(place)):
            if s != avoid and choice.free[s] > place[s] and (to < 0 or choice.free[s] > choice.free[to]):
                to = s
        if to < 0:
            return False
        place[to] = min(left, choice.free[to])
        left -= place[to]
    _take(scene, choice, i, True)
    return True


@njit(cache=True)
def _changed(scene: Scene, must: BoolArray, base: Choice, i: int, avoid: int) -> tuple[bool, Choice]:
    """Whether row i, if it spans nodes, can begin or end, or run without node `avoid`; and the choice then."""
    trial = _copy(base)
    if i < scene.small:
        return True, trial
    if avoid != _STAY:
        leaves = avoid == _ANYWHERE or base.place[i - scene.small, avoid] > 0
        return leaves and _replace(scene, trial, i, avoid), trial
    if base.runs[i]:
        _take(scene, trial, i, False)
        return True, trial
    return _make_way(scene, must, trial, i), trial


@njit(cache=True)
def _fill(scene: Scene, aim: FloatArray, must: BoolArray, choice: Choice) -> None:
    """Run the best full sets of small rows on all nodes, beside those that span nodes or must run."""
    n, gpus = scene.small, float(scene.gpus_of_node.sum())
    x = scene.owed - aim + scene.part * gpus / scene.part.sum()
    for i in range(len(choice.runs)):
        if choice.runs[i]:
            x[scene.user[i]] -= scene.size[i]
    rows, chosen, worth = np.empty(n + 1, np.int64), np.empty(n + 1, np.bool_), np.empty(n)
    table = np.empty((n + 2, scene.gpus_of_node.max() + 1))
    for _ in range(_SWEEPS):
        for s in range(len(choice.free)):
            m = 0
            for i in range(n):
                if choice.where[i] == s and not must[i]:
                    rows[m] = i
                    m += 1
                    if choice.runs[i]:
                        _take(scene, choice, i, False)
                        x[scene.user[i]] += scene.size[i]
            by_size(rows, m, scene.size)
            for i in rows[:m]:
                now = x[scene.user[i]]
                worth[i] = (abs(now) / gpus) ** _POWER - (abs(now - scene.size[i]) / gpus) ** _POWER
            full_set(rows, m, worth, scene.size, choice.free[s], table, chosen)
            for k in range(m):
                if chosen[k]:
                    _take(scene, choice, rows[k], True)
                    x[scene.user[rows[k]]] -= scene.size[rows[k]]


@njit(cache=True)
def _clear(scene: Scene, must: BoolArray, choice: Choice) -> Choice:
    """The same without small rows that need not run."""
    out = _copy(choice)
    for i in range(scene.small):
        if out.runs[i] and not must[i]:
            _take(scene, out, i, False)
    return out


# -- the choice ------------------------------------------------------------------------------------------


@njit(cache=True)
def _bearable(scene: Scene, had: FloatArray) -> bool:
    """Whether nobody is too far off by it.

    That is further than LIMIT, or who can hardly make up for it further behind than half of that, and than before.
    """
    gpus, off = scene.gpus_of_node.sum(), _off(scene, had)
    for u in range(len(off)):
        before = scene.owed[u] / gpus
        most = 0.5 * LIMIT if scene.urgency[u] > _HARDLY else LIMIT
        if off[u] > max(most, before) + 1e-9 or off[u] < min(-LIMIT, before) - 1e-9:
            return False
    return True


@njit(cache=True)
def _run_on(
    scene: Scene, must: BoolArray, rank: Ints, choice: Choice, i: int, node: int
) -> tuple[bool, Choice]:
    """Whether row i can run on this node (a span: where it is bound), with nobody too far off; and how."""
    trial = _clear(scene, must, choice)
    if i < scene.small:
        trial.where[i] = node
    if scene.size[i] > scene.gpus_of_node[node] and i < scene.small:
        return False, choice
    must[i] = _make_way(scene, must, trial, i)
    if must[i]:
        _fill(scene, np.zeros(len(scene.part)), must, trial)
        must[i] = _bearable(scene, _had(scene, rank, trial))
    return must[i], trial


@njit(cache=True)
def _press(
    scene: Scene, must: BoolArray, movable: BoolArray, most_moves: int, rank: Ints, choice: Choice
) -> tuple[Choice, FloatArray, int]:
    """Rows that have waited half their patience run, and must from now on, where nobody is too far off by it.

    Those on one node may change it for that. Otherwise their user is to save up for them, or it would be ahead by all
    of the gang when patience ends: the second are what users aim to be owed, half of what the gang will take.
    """
    aim, tried = np.zeros(len(scene.part)), 0
    for i in np.argsort(-scene.waited_turns, kind="mergesort"):
        if scene.waited_turns[i] < 0.5 * scene.patience_turns or tried == _MOST_PRESSED:
            break
        if choice.runs[i]:
            continue
        tried += 1
        home = choice.where[i] if i < scene.small else 0
        ok, trial = _run_on(scene, must, rank, choice, i, home)
        for s in range(len(choice.free) if i < scene.small and movable[i] and most_moves > 0 else 0):
            if not ok and s != home:
                ok, trial = _run_on(scene, must, rank, choice, i, s)
                if ok:
                    most_moves -= 1
        if ok:
            choice = trial
        else:
            u = scene.user[i]
            aim[u] = max(aim[u], 0.5 * scene.size[i] * (1.0 - scene.part[u] / scene.part.sum()))
    return choice, aim, most_moves


@njit(cache=True)
def steer(
    scene: Scene,
    choice: Choice,
    must: BoolArray,
    movable: BoolArray,
    most_moves: int,
    rank: Ints,
) -> Choice:
    """The choice itself, or a better one where a user would be too far off by it.

    Rows that `must` run do so in any case. Step by step, the gang that spans nodes and that helps most begins, ends
    or changes its nodes (if `movable`), with the best sets of small jobs beside it.
    """
    n, gpus = scene.small, scene.gpus_of_node.sum()
    if np.abs(scene.owed).max() > LOST * gpus:
        return choice
    must, movable = must.copy(), movable.copy()
    choice, aim, most_moves = _press(scene, must, movable, most_moves, rank, choice)
    off = np.abs(_off(scene, _had(scene, rank, choice)) - aim / gpus)
    if off.max() <= LIMIT:
        return choice
    least = (off**_POWER).sum()
    for _ in range(_STEPS):
        base, at, moves = _clear(scene, must, choice), -1, False
        for i in range(n - 1, len(choice.runs)):  # n - 1: other sets of small rows only
            if i >= n and must[i]:
                continue
            may_move = i >= n and movable[i] and most_moves > 0
            for avoid in range(_STAY, len(choice.free) if may_move else _ANYWHERE):
                ok, trial = _changed(scene, must, base, i, avoid)
                if not ok:
                    continue
                _fill(scene, aim, must, trial)
                value = (np.abs(_off(scene, _had(scene, rank, trial)) - aim / gpus) ** _POWER).sum()
                if value < least * (1.0 if avoid == _STAY else 1.0 - _MIN_GAIN) - 1e-12:
                    least, at, moves, choice = value, i, avoid != _STAY, trial
        if at < n:
            break
        if moves:
            movable[at] = False
            most_moves -= 1
    return choice
