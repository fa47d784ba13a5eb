"""Where jobs are bound: to a GPU type that suits their user's part of it, and there to a node or several."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shoal.core.compiled import inner, kernel
from shoal.policies.gandiva_fair.kernels import NOWHERE, SPANS, BoolArray, FloatArray, IntArray


@kernel
def look_up(
    stored: FloatArray, size: IntArray, gpus_of_node: IntArray, type_of_node: IntArray
) -> tuple[IntArray, IntArray, bool]:
    """(home, type, does any span nodes) by what is remembered of each row; a node too small is no home.

    `stored` is the node + 1, 0 for none, below 0 for a gang that spans nodes: its type is left open (-1).
    """
    n = len(stored)
    home, types, spanning = np.full(n, NOWHERE, np.int32), np.full(n, -1, np.int32), False
    for i in range(n):
        if stored[i] < 0.0:
            home[i], spanning = SPANS, True
        elif stored[i] > 0.0:
            s = int(stored[i]) - 1
            if gpus_of_node[s] >= size[i]:
                home[i], types[i] = s, type_of_node[s]
    return home, types, spanning


@kernel
def set_adrift(home: IntArray, gpu_type: IntArray, speed: FloatArray) -> BoolArray:
    """Who can run at all; a type that has become unusable for a job binds it no longer."""
    types, n = speed.shape
    can_run = np.zeros(n, np.bool_)
    for i in range(n):
        for t in range(types):
            can_run[i] |= speed[t, i] > 0.0
        if home[i] != NOWHERE and speed[max(gpu_type[i], 0), i] <= 0.0:
            home[i], gpu_type[i] = NOWHERE, -1
    return can_run


@kernel
def speeds_by_type(
    speeds: FloatArray, speed_at: IntArray, type_max: IntArray, size: IntArray, gpus_of_type: IntArray
) -> FloatArray:
    """[type, row]: speed of the gang on each type, 0 where it cannot run: not allowed, not enough GPUs.

    Where the profile ends below the gang on all types, those with the longest one do.
    """
    types, n = speed_at.shape
    out = np.zeros((types, n))
    for i in range(n):
        longest = 0
        for t in range(types):
            longest = max(longest, type_max[t, i])
        need = min(size[i], longest)
        for t in range(types):
            if type_max[t, i] >= max(need, 1) and gpus_of_type[t] >= size[i]:
                out[t, i] = speeds[speed_at[t, i] + min(size[i], type_max[t, i])]
    return out


@kernel
def demand_by_user(
    speed: FloatArray, user: IntArray, size: IntArray, users: int
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """(demand[user], may_use[user, type], speed[user, type]) of all that can run.

    A user's speed on a type is the geometric mean over its jobs, of one GPU; nan if one of them cannot run
    there: who cannot use a type with all its jobs does not trade in it.
    """
    types, n = speed.shape
    demand, may_use = np.zeros(users), np.zeros((users, types))
    logs, known, jobs = np.zeros((users, types)), np.zeros((users, types)), np.zeros(users)
    for i in range(n):
        u, runs = user[i], False
        for t in range(types):
            if speed[t, i] > 0.0:
                runs = True
                may_use[u, t] += size[i]
                known[u, t] += 1.0
                if types > 1:
                    logs[u, t] += np.log(speed[t, i] / size[i])
        if runs:
            demand[u] += size[i]
            jobs[u] += 1.0
    own = np.full((users, types), np.nan)
    for u in range(users):
        for t in range(types):
            if jobs[u] > 0 and known[u, t] == jobs[u]:
                own[u, t] = np.exp(logs[u, t] / jobs[u])
    return demand, may_use, own


@kernel
def targets(weights: FloatArray, demand: FloatArray) -> FloatArray:
    """[user, type]: GPUs' worth of jobs to bind to each type, in proportion to the user's part of it."""
    users, types = weights.shape
    out = np.zeros((users, types))
    for u in range(users):
        total = 0.0
        for t in range(types):
            total += weights[u, t]
        if total > 0.0:
            for t in range(types):
                out[u, t] = weights[u, t] * demand[u] / total
    return out


@inner
def _choose_type(i: int, u: int, size: int, speed: FloatArray, target: FloatArray, bound: FloatArray) -> int:
    """The type for a job of user u: the fastest for it where the user's target has room for half the gang,
    else the one with most room; -1 if it can run on none."""
    best, roomiest = -1, -1
    for t in range(speed.shape[0]):
        if speed[t, i] <= 0.0:
            continue
        room = target[u, t] - bound[u, t]
        if room >= 0.5 * size and (best < 0 or speed[t, i] > speed[best, i]):
            best = t
        if roomiest < 0 or room > target[u, roomiest] - bound[u, roomiest]:
            roomiest = t
    return best if best >= 0 else roomiest


@kernel
def choose_types(
    rows: NDArray[np.int64],
    user: IntArray,
    size: IntArray,
    speed: FloatArray,
    target: FloatArray,
    bound: FloatArray,
) -> IntArray:
    """A type for each of `rows`, one after the other; `bound[user, type]` counts what is bound so far."""
    out = np.full(len(rows), -1, np.int32)
    for k in range(len(rows)):
        i = rows[k]
        t = _choose_type(i, user[i], size[i], speed, target, bound)
        out[k] = t
        if t >= 0:
            bound[user[i], t] += size[i]
    return out


@kernel
def retype(
    order: NDArray[np.int64],
    user: IntArray,
    size: IntArray,
    gpu_type: IntArray,
    speed: FloatArray,
    target: FloatArray,
    bound: FloatArray,
    movable: BoolArray,
    most: int,
) -> list[tuple[int, int]]:
    """(row, type): jobs that move from a type where their user has too many to one where it has too few.

    A move must be worth it: by half a gang at least on both sides, so it is not undone by the next.
    """
    moves = [(0, 0) for _ in range(0)]
    for i in order:
        if len(moves) >= most:
            break
        a, u = gpu_type[i], user[i]
        if a < 0 or not movable[i] or bound[u, a] - target[u, a] < 0.5 * size[i]:
            continue
        best = -1
        for t in range(speed.shape[0]):
            room = target[u, t] - bound[u, t] >= 0.5 * size[i]
            if t != a and room and speed[t, i] > 0.0 and (best < 0 or speed[t, i] > speed[best, i]):
                best = t
        if best >= 0:
            bound[u, a] -= size[i]
            bound[u, best] += size[i]
            moves.append((i, best))
    return moves


@kernel
def choose_nodes(
    rows: NDArray[np.int64],
    gpu_type: IntArray,
    size: IntArray,
    tickets: FloatArray,
    type_of_node: IntArray,
    gpus_of_node: IntArray,
    free: IntArray,
    load: FloatArray,
) -> IntArray:
    """A node of its type for each of `rows`; -1 where none is large enough.

    While a node has room for the gang now, the one with least to spare; else the one with the lowest ticket
    load per GPU. Updates `free` and `load`.
    """
    out = np.full(len(rows), -1, np.int32)
    for k in range(len(rows)):
        i = rows[k]
        fit, light = -1, -1
        for s in range(len(gpus_of_node)):
            if type_of_node[s] != gpu_type[i] or gpus_of_node[s] < size[i]:
                continue
            if free[s] >= size[i] and (fit < 0 or free[s] < free[fit]):
                fit = s
            if light < 0 or load[s] < load[light]:
                light = s
        chosen = fit if fit >= 0 else light
        out[k] = chosen
        if chosen >= 0:
            free[chosen] = max(free[chosen] - size[i], 0)
            load[chosen] += tickets[i] / gpus_of_node[chosen]
    return out
