"""Another set of gangs where the one that passes choose would take a user too far off its part.

Passes weigh what jobs had, not what they are about to have: a gang as large as several nodes gives its user more in
one quantum than all others can make good in many. So before a quantum begins, what users would have by its end is
counted; where one would be too far off, that set of gangs runs, on all nodes at once, by which the furthest are least
far off (as in Tijdeman's chairman assignment, 1980, nobody is taken further ahead than others can bear).

Loops are plain, and few arrays go from function to function: this is compiled at the first use of a policy.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shoal.core.compiled import inner, kernel
from shoal.policies.gandiva_fair.kernels import BoolArray, FloatArray, IntArray
from shoal.policies.gandiva_fair.sets import by_size, full_set

Ints = NDArray[np.int64]

#: How far off a user may be after the quantum, in quanta of all GPUs, before another set is looked for.
LIMIT = 0.7
#: Where a user is further off than this, not all can have their parts: sets then go by weight alone.
LOST = 2.0
#: Distances count to this power, so that the furthest count most.
_POWER = 6
#: How often the sets of all nodes are chosen again, as users have what they have on all of them together.
_SWEEPS = 3
#: How many gangs begin, end or change their nodes for this at most; and what a change of nodes must gain.
_STEPS = 4
_MIN_GAIN = 0.1
#: Jobs on one node change it for a user that is this far behind.
_BEHIND = 0.35
#: Whose being behind counts for more than this can hardly make up for it: see `accounts.urgency`.
_HARDLY = 5.0
#: How many rows that have waited long are tried to run in one quantum; the longest wait comes first.
_MOST_PRESSED = 8


#: A span keeps its nodes, or may have any; else it leaves this one.
_STAY, _ANYWHERE = -2, -1


class Scene(NamedTuple):
    """Jobs of one GPU type; rows from `small` on are gangs that span nodes."""

    user: IntArray
    size: IntArray
    small: int
    #: GPUs of all nodes, and of the widest.
    gpus: int
    widest: int
    #: Of each user: what it had too little, in GPU quanta, its part of all, and how much more it counts if behind.
    owed: FloatArray
    part: FloatArray
    urgency: FloatArray


class Choice(NamedTuple):
    """Who runs, the GPUs left on each node, and [row, node] the GPUs that each row takes if it runs."""

    runs: BoolArray
    free: Ints
    place: Ints


@inner
def _copy(choice: Choice) -> Choice:
    return Choice(choice.runs.copy(), choice.free.copy(), choice.place.copy())


# -- what users will have ------------------------------------------------------------------------------


@inner
def _owed_after(scene: Scene, rank: Ints, choice: Choice) -> FloatArray:
    """What users are owed after a quantum in which these rows run, in quanta of all GPUs.

    Idle GPUs take in others as `Binding.attract` does, by `rank`: first those on one node.
    """
    had, room, n, idle = np.zeros(len(scene.part)), choice.free.copy(), len(rank), 0
    for s in range(len(room)):
        idle += room[s]
    for i in range(n):
        if choice.runs[i]:
            had[scene.user[i]] += scene.size[i]
    for k in range(2 * n):
        if idle == 0:
            break
        i, spans, to = rank[k % n], k >= n, -1
        left = scene.size[i]
        if choice.runs[i] or (i >= scene.small) != spans or left > idle:
            continue
        for s in range(len(room)):
            if spans:
                taken = min(left, room[s])
                room[s] -= taken
                left -= taken
            elif room[s] >= left and (to < 0 or room[s] < room[to]):
                to = s
        if to >= 0:
            room[to] -= left
        if to >= 0 or spans:
            had[scene.user[i]] += scene.size[i]
            idle -= scene.size[i]
    total = 0.0
    for u in range(len(had)):
        total += had[u]
    for u in range(len(had)):
        had[u] = (scene.owed[u] + scene.part[u] * total - had[u]) / scene.gpus
    return had


# -- other choices ---------------------------------------------------------------------------------------


@inner
def _turn(choice: Choice, i: int) -> None:
    """Row i runs if it did not, and the other way round."""
    choice.runs[i] = not choice.runs[i]
    for s in range(len(choice.free)):
        choice.free[s] -= choice.place[i, s] if choice.runs[i] else -choice.place[i, s]


@inner
def _make_way(scene: Scene, must: BoolArray, choice: Choice, i: int) -> bool:
    """Whether row i can run where it is bound, which it then does; gangs that span nodes and keep it out do not."""
    _turn(choice, i)
    for other in range(scene.small, len(must)):
        in_way = False
        for s in range(len(choice.free)):
            in_way |= choice.free[s] < 0 and choice.place[other, s] > 0
        if in_way and other != i and choice.runs[other] and not must[other]:
            _turn(choice, other)
    fits = True
    for s in range(len(choice.free)):
        fits &= choice.free[s] >= 0
    return fits


@inner
def _replace(scene: Scene, choice: Choice, i: int, avoid: int) -> bool:
    """Whether row i, which spans nodes, can run without node `avoid`; then it does, where most GPUs are free."""
    if choice.runs[i]:
        _turn(choice, i)
    free, place, left = choice.free, choice.place, scene.size[i]
    for s in range(len(free)):
        place[i, s] = 0
    while left > 0:
        to = -1
        for s in range(len(free)):
            if s != avoid and free[s] > place[i, s] and (to < 0 or free[s] > free[to]):
                to = s
        if to < 0:
            return False
        place[i, to] = min(left, free[to])
        left -= place[i, to]
    _turn(choice, i)
    return True


@inner
def _change(scene: Scene, must: BoolArray, choice: Choice, i: int, node: int) -> bool:
    """Whether row i can change its place, which it then does, or, if it spans nodes, begin or end.

    One that spans nodes leaves node `node`; one on a node goes there. Without a row nothing changes.
    """
    if i < 0:
        return True
    if i < scene.small:
        moves = choice.place[i, node] == 0
        for s in range(len(choice.free)):
            choice.place[i, s] = scene.size[i] if s == node else 0
        return moves
    if node != _STAY:
        leaves = node == _ANYWHERE or choice.place[i, node] > 0
        return leaves and _replace(scene, choice, i, node)
    if choice.runs[i]:
        _turn(choice, i)
        return True
    return _make_way(scene, must, choice, i)


@inner
def _clear_node(scene: Scene, must: BoolArray, choice: Choice, s: int, x: FloatArray, rows: Ints) -> int:
    """End small rows on node s that need not run; put them in `rows`, and say how many there are."""
    m = 0
    for i in range(scene.small):
        if choice.place[i, s] > 0 and not must[i]:
            rows[m] = i
            m += 1
            if choice.runs[i]:
                _turn(choice, i)
                x[scene.user[i]] += scene.size[i]
    return m


@inner
def _fill(scene: Scene, aim: FloatArray, must: BoolArray, choice: Choice) -> None:
    """Run the best full sets of small rows on all nodes, beside those that span nodes or must run."""
    n, gpus, user, size = scene.small, float(scene.gpus), scene.user, scene.size
    x = np.empty(len(aim))
    for u in range(len(aim)):
        x[u] = scene.owed[u] - aim[u] + scene.part[u] * gpus
    for i in range(len(must)):
        if choice.runs[i]:
            x[user[i]] -= size[i]
    rows, chosen, worth = np.empty(n + 1, np.int64), np.empty(n + 1, np.bool_), np.empty(n)
    table = np.empty((n + 2, scene.widest + 1))
    for k in range(_SWEEPS * len(choice.free)):
        s = k % len(choice.free)
        m = _clear_node(scene, must, choice, s, x, rows)
        by_size(rows, m, size)
        for j in range(m):
            i = rows[j]
            now = x[user[i]]
            worth[i] = (abs(now) / gpus) ** _POWER - (abs(now - size[i]) / gpus) ** _POWER
        full_set(rows, m, worth, size, choice.free[s], table, chosen)
        for j in range(m):
            if chosen[j]:
                _turn(choice, rows[j])
                x[user[rows[j]]] -= size[rows[j]]


@inner
def _clear(scene: Scene, must: BoolArray, choice: Choice) -> Choice:
    """The same without small rows that need not run."""
    out = _copy(choice)
    for i in range(scene.small):
        if out.runs[i] and not must[i]:
            _turn(out, i)
    return out


# -- the choice ------------------------------------------------------------------------------------------


def in_question(scene: Scene, choice: Choice, pressed: Ints) -> bool:
    """Whether `steer` might change the choice: a look that costs little, as most choices are well."""
    if np.abs(scene.owed).max() > LOST * scene.gpus:
        return False
    waiting = ~choice.runs
    if waiting[pressed].any() or (waiting.any() and scene.size[waiting].min() <= choice.free.sum()):
        return True
    had = np.bincount(scene.user, weights=scene.size * choice.runs, minlength=len(scene.part))
    off = np.abs(scene.owed + scene.part * had.sum() - had)
    return bool(off.max() > (LIMIT - 1e-9) * scene.gpus)


@inner
def _far(scene: Scene, aim: FloatArray, rank: Ints, choice: Choice) -> tuple[float, float]:
    """How far users are off what they aim to be owed: the furthest, and the sum of powers."""
    off, furthest, far = _owed_after(scene, rank, choice), 0.0, 0.0
    for u in range(len(off)):
        x = abs(off[u] - aim[u] / scene.gpus)
        furthest = max(furthest, x)
        far += x**_POWER
    return furthest, far


@inner
def _bearable(scene: Scene, rank: Ints, choice: Choice) -> bool:
    """Whether nobody is too far off by it.

    That is further than LIMIT, or who can hardly make up for it further behind than half of that, and than before.
    """
    off = _owed_after(scene, rank, choice)
    for u in range(len(off)):
        before = scene.owed[u] / scene.gpus
        most = 0.5 * LIMIT if scene.urgency[u] > _HARDLY else LIMIT
        if off[u] > max(most, before) + 1e-9 or off[u] < min(-LIMIT, before) - 1e-9:
            return False
    return True


@inner
def _run_on(scene: Scene, must: BoolArray, rank: Ints, choice: Choice, i: int, node: int) -> bool:
    """Whether row i can run on this node (below 0: where it is bound), with nobody too far off; then it must."""
    for s in range(len(choice.free) if node >= 0 else 0):
        choice.place[i, s] = scene.size[i] if s == node else 0
    must[i] = _make_way(scene, must, choice, i)
    if must[i]:
        _fill(scene, np.zeros(len(scene.part)), must, choice)
        must[i] = _bearable(scene, rank, choice)
    return must[i]


@inner
def _press(
    scene: Scene,
    must: BoolArray,
    movable: BoolArray,
    most_moves: int,
    rank: Ints,
    pressed: Ints,
    aim: FloatArray,
    choice: Choice,
) -> tuple[int, Choice]:
    """Rows that are `pressed` run, and must from now on, where nobody is too far off by it; (moves left, choice).

    Those on one node may change it for that. Otherwise their user is to save up for them, or it would be ahead by all
    of the gang when patience ends: `aim` is what users aim to be owed, half of what the gang will take.
    """
    tried = 0
    for i in pressed:
        if choice.runs[i] or tried == _MOST_PRESSED:
            continue
        tried += 1
        ok, u = False, scene.user[i]
        for s in range(-1, len(choice.free) if i < scene.small and movable[i] and most_moves > 0 else 0):
            if ok or (s >= 0 and choice.place[i, s] > 0):
                continue
            trial = _clear(scene, must, choice)
            ok = _run_on(scene, must, rank, trial, i, s)
            if ok:
                choice = trial
                most_moves -= 1 if s >= 0 else 0
        if not ok:
            aim[u] = max(aim[u], 0.5 * scene.size[i] * (1.0 - scene.part[u]))
    return most_moves, choice


@kernel
def steer(
    scene: Scene,
    choice: Choice,
    must: BoolArray,
    movable: BoolArray,
    most_moves: int,
    rank: Ints,
    pressed: Ints,
) -> Choice:
    """The choice itself, or a better one where a user would be too far off by it.

    Rows that `must` run do so in any case; those that are `pressed` have waited half their patience, the longest
    first. Step by step, the gang that spans nodes and that helps most begins, ends or changes its nodes (if
    `movable`), or a waiting job of a user that is behind changes its node, with the best sets of small jobs beside it.
    """
    n, aim = scene.small, np.zeros(len(scene.part))
    must, movable = must.copy(), movable.copy()
    most_moves, choice = _press(scene, must, movable, most_moves, rank, pressed, aim, choice)
    furthest, least = _far(scene, aim, rank, choice)
    for _ in range(_STEPS if furthest > LIMIT else 0):
        base, at, moves, off = _clear(scene, must, choice), -1, False, _owed_after(scene, rank, choice)
        now = choice
        for i in range(-1, len(must)):  # -1: other sets of small rows only
            if i >= 0 and (must[i] or (i < n and (now.runs[i] or off[scene.user[i]] < _BEHIND))):
                continue
            may_move = i >= 0 and movable[i] and most_moves > 0
            for node in range(0 if 0 <= i < n else _STAY, len(choice.free) if may_move else _ANYWHERE):
                trial = _copy(base)
                if not _change(scene, must, trial, i, node):
                    continue
                _fill(scene, aim, must, trial)
                _, value = _far(scene, aim, rank, trial)
                if value < least * (1.0 if node == _STAY else 1.0 - _MIN_GAIN) - 1e-12:
                    least, at, moves, choice = value, i, node != _STAY, trial
        if at < 0:
            break
        if moves:
            movable[at] = False
            most_moves -= 1
    return choice
