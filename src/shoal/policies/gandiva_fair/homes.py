"""Where jobs are bound: to a GPU type that suits their user's shares, and to a node of that type."""

from __future__ import annotations

import numpy as np

from shoal.core.arrays import BoolArray, FloatArray, IntArray
from shoal.core.compiled import inner, kernel
from shoal.policies.gandiva_fair.tables import NOWHERE, SPANS, Jobs, Nodes, Rows, TypeTargets


@kernel
def look_up(stored: FloatArray, size: IntArray, nodes: Nodes) -> tuple[IntArray, IntArray, bool]:
    """(home, GPU type, whether any gang spans nodes) from the stored column of each row.

    `stored` is node + 1; 0 for no home; below 0 for a gang that spans nodes, whose type is left open (-1). A node that
    is too small for the job, for instance because it is lost, is no home.
    """
    n = len(stored)
    home, gpu_type, spanning = np.full(n, NOWHERE, np.int32), np.full(n, -1, np.int32), False
    for i in range(n):
        if stored[i] < 0.0:
            home[i], spanning = SPANS, True
        elif stored[i] > 0.0:
            s = int(stored[i]) - 1
            if nodes.gpus[s] >= size[i]:
                home[i], gpu_type[i] = s, nodes.gpu_type[s]
    return home, gpu_type, spanning


@kernel
def unbind_unusable(home: IntArray, gpu_type: IntArray, speed: FloatArray) -> BoolArray:
    """Which rows can run on any type. Rows bound to a type that they cannot use any more lose their home."""
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
    """[type, row]: speed of the gang on each type; 0 where it may not run or where there are too few GPUs.

    If the profiles of all types end below the gang size, the types with the longest profile count, with the speed at
    the end of the profile.
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
    """(demand[user], may_use[user, type], speed[user, type]) of all jobs that can run.

    A user's speed on a type is the geometric mean of the speed of one GPU over its jobs. It is nan if one of the
    jobs cannot run on the type: such a user does not trade in it.
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
    """[user, type]: GPUs' worth of jobs to bind to each type, in proportion to the user's share of it."""
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
def _choose_type(i: int, want: TypeTargets) -> int:
    """The fastest type on which the user's target has room for half the gang; else the type with the most room.

    -1 if the job can run on no type.
    """
    u = want.user[i]
    best, roomiest = -1, -1
    for t in range(want.speed.shape[0]):
        if want.speed[t, i] <= 0.0:
            continue
        room = want.target[u, t] - want.bound[u, t]
        if room >= 0.5 * want.size[i] and (best < 0 or want.speed[t, i] > want.speed[best, i]):
            best = t
        if roomiest < 0 or room > want.target[u, roomiest] - want.bound[u, roomiest]:
            roomiest = t
    return best if best >= 0 else roomiest


@kernel
def choose_types(rows: Rows, want: TypeTargets) -> IntArray:
    """A type for each of `rows`, one after the other."""
    out = np.full(len(rows), -1, np.int32)
    for k in range(len(rows)):
        out[k] = _choose_type(rows[k], want)
        if out[k] >= 0:
            want.bound[want.user[rows[k]], out[k]] += want.size[rows[k]]
    return out


@kernel
def retype(
    order: Rows, gpu_type: IntArray, movable: BoolArray, most: int, want: TypeTargets
) -> list[tuple[int, int]]:
    """(row, type): jobs that move from a type where their user has too many jobs to one where it has too few.

    A job moves only if both types are off their target by half its gang or more, so that no move is undone by the
    next.
    """
    moves = [(0, 0) for _ in range(0)]
    for i in order:
        if len(moves) >= most:
            break
        a, u, half = gpu_type[i], want.user[i], 0.5 * want.size[i]
        if a < 0 or not movable[i] or want.bound[u, a] - want.target[u, a] < half:
            continue
        best = -1
        for t in range(want.speed.shape[0]):
            fits = t != a and want.target[u, t] - want.bound[u, t] >= half and want.speed[t, i] > 0.0
            if fits and (best < 0 or want.speed[t, i] > want.speed[best, i]):
                best = t
        if best >= 0:
            want.bound[u, a] -= want.size[i]
            want.bound[u, best] += want.size[i]
            moves.append((i, best))
    return moves


@kernel
def choose_nodes(
    rows: Rows, gpu_type: IntArray, jobs: Jobs, nodes: Nodes, free: IntArray, load: FloatArray
) -> None:
    """Give each of `rows` a home on a node of its type, where one is large enough. Updates `free` and `load`.

    If the gang fits on free GPUs now, it takes the node with the fewest of them that holds it. Otherwise it takes
    the node with the lowest ticket load per GPU.
    """
    for i in rows:
        fit, light, size = -1, -1, jobs.size[i]
        for s in range(len(nodes.gpus)):
            if nodes.gpu_type[s] != gpu_type[i] or nodes.gpus[s] < size:
                continue
            if free[s] >= size and (fit < 0 or free[s] < free[fit]):
                fit = s
            if light < 0 or load[s] < load[light]:
                light = s
        chosen = fit if fit >= 0 else light
        if chosen >= 0:
            jobs.home[i] = chosen
            free[chosen] = max(free[chosen] - size, 0)
            load[chosen] += jobs.due[i] / nodes.gpus[chosen]
