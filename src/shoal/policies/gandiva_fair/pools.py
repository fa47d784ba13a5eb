"""Sharing GPUs out in whole numbers between gangs and pools, and inside a pool by AFS.

A pool is all the jobs of one user, on one GPU type, that can change size: it can use any number of GPUs. So
pools and rigid gangs are ordered by pass as jobs are under stride; a gang takes its size or is passed over,
a pool takes the whole GPUs it is due, the fraction being carried over to the next time.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shoal.core.arrays import BoolArray, FloatArray, IntArray
from shoal.core.compiled import inlined, inner, kernel
from shoal.core.stable_order import stable_order
from shoal.policies.afs.afs_l import afs_l_shares
from shoal.policies.afs.afs_p import hand_out_by_gain, start_in_order
from shoal.policies.gandiva_fair.dues import NO_DUE, rows_by_group

Rows = NDArray[np.int64]


@kernel
def grant(
    gangs: Rows,
    passed: FloatArray,
    size: IntArray,
    keep: BoolArray,
    pool_rate: FloatArray,
    pool_lag: FloatArray,
    pool_cap: FloatArray,
    quantum_s: float,
    gpus: int,
    shares: IntArray,
) -> IntArray:
    """GPUs of each pool; gangs that run get theirs in `shares`. One GPU type, `gpus` of it in all.

    By ascending pass, gangs before pools where equal: a gang takes its size if it is free. A pool takes
    floor(rate - lag / quantum), what it is due with what it lacks of the time before; whatever fractions add
    up to goes out in the same order, one GPU each. Gangs in `keep` are inside their quantum and go first.
    """
    users = len(pool_rate)
    out = np.zeros(users, np.int32)
    free = gpus
    for i in gangs:
        if keep[i] and size[i] <= free:
            shares[i] = size[i]
            free -= size[i]
    key, what = np.empty(len(gangs) + users), np.empty(len(gangs) + users, np.int64)
    m = 0
    for i in gangs:
        if shares[i] == 0:
            key[m], what[m] = passed[i], -1 - i
            m += 1
    for u in range(users):
        if pool_cap[u] > 0.0:
            key[m], what[m] = pool_lag[u] / max(pool_rate[u], NO_DUE), u
            m += 1
    order = stable_order(key[:m])
    for e in order:
        if what[e] < 0:
            i = -1 - what[e]
            if size[i] <= free:
                shares[i] = size[i]
                free -= size[i]
            continue
        u = what[e]
        due = np.floor(pool_rate[u] - pool_lag[u] / quantum_s + 1e-9)
        out[u] = int(min(max(due, 0.0), min(pool_cap[u], float(free))))
        free -= out[u]
    for e in order:
        if free > 0 and what[e] >= 0:
            u = what[e]
            if pool_rate[u] > out[u] and out[u] < pool_cap[u]:
                out[u] += 1
                free -= 1
    return out


@kernel
def form_pools(
    t: int,
    gpu_type: IntArray,
    rigid: BoolArray,
    user: IntArray,
    rate: FloatArray,
    cap: IntArray,
    type_max: IntArray,
    users: int,
) -> tuple[IntArray, IntArray, FloatArray, FloatArray]:
    """(pool of each row, its limit, due of each pool, most it can use) on type t.

    A pool goes by its user; gangs, and rows on other types, are in none (-1).
    """
    n = len(gpu_type)
    pool, limit = np.full(n, -1, np.int32), cap.copy()
    due, most = np.zeros(users), np.zeros(users)
    for i in range(n):
        if rigid[i]:
            continue
        limit[i] = min(cap[i], type_max[i])
        if gpu_type[i] == t:
            pool[i] = user[i]
            due[user[i]] += rate[i]
            most[user[i]] += limit[i]
    return pool, limit, due, most


@inner
def _by_turns(
    rows: Rows, gpus: int, now_gpus: IntArray, kept: BoolArray, turns: FloatArray, first_start_s: FloatArray
) -> tuple[IntArray, BoolArray]:
    """(positions in `rows` by turns had, who keeps its share): jobs inside their turn keep it while jobs
    outnumber the GPUs, as under AFS-P."""
    n = len(rows)
    keep, holding = np.zeros(n, np.bool_), 0
    first, had = np.empty(n), np.empty(n)
    for k in range(n):
        keep[k] = n >= gpus and kept[rows[k]]
        holding += now_gpus[rows[k]] if keep[k] else 0
        first[k] = first_start_s[rows[k]]
    for k in range(n):
        keep[k] = keep[k] and holding <= gpus
    order = stable_order(first)
    for k in range(n):
        had[k] = turns[rows[order[k]]]
    others, m = np.empty(n, np.int32), 0
    for k in stable_order(had):
        if not keep[order[k]]:
            others[m] = order[k]
            m += 1
    return others[:m], keep


@kernel
def share_pools_by_length(
    pool: IntArray,
    granted: IntArray,
    remaining: FloatArray,
    speeds: FloatArray,
    at: IntArray,
    min_gpus: IntArray,
    cap: IntArray,
    shares: IntArray,
) -> None:
    """Shares of the jobs of each pool out of its grant, by AFS-L."""
    start, rows = rows_by_group(pool, len(granted))
    for p in range(len(granted)):
        mine, gpus = rows[start[p] : start[p + 1]], np.int64(granted[p])
        if len(mine) == 0 or gpus == 0:
            continue
        out = afs_l_shares(remaining[mine], speeds, at[mine], min_gpus[mine], cap[mine], gpus)
        for k in range(len(mine)):
            shares[mine[k]] = out[k]


@inlined
def _those_of(chosen: BoolArray) -> IntArray:
    """As `np.flatnonzero`, which takes longer to compile than a loop; so does a sum."""
    found, count = np.empty(len(chosen), np.int32), 0
    for k in range(len(chosen)):
        found[count] = k
        count += chosen[k]
    return found[:count]


@inlined
def _sum(numbers: IntArray) -> int:
    total = 0
    for k in range(len(numbers)):
        total += int(numbers[k])
    return total


@kernel
def share_pools_by_gain(
    pool: IntArray,
    granted: IntArray,
    now_gpus: IntArray,
    kept: BoolArray,
    turns: FloatArray,
    first_start_s: FloatArray,
    speeds: FloatArray,
    at: IntArray,
    min_gpus: IntArray,
    cap: IntArray,
    shares: IntArray,
) -> None:
    """Shares of the jobs of each pool out of its grant, by AFS-P."""
    start, rows = rows_by_group(pool, len(granted))
    for p in range(len(granted)):
        mine, gpus = rows[start[p] : start[p + 1]], np.int64(granted[p])
        if len(mine) == 0 or gpus == 0:
            continue
        others, keep = _by_turns(mine, gpus, now_gpus, kept, turns, first_start_s)
        out, started, left = start_in_order(others, keep, now_gpus[mine], min_gpus[mine], gpus)
        begin, most = at[mine], cap[mine]
        for line in (started, _those_of(keep)):
            if left > 0:
                hand_out_by_gain(out, line, speeds, begin, most, left)
                left = int(gpus) - _sum(out)
        for k in range(len(mine)):
            shares[mine[k]] = out[k]


@kernel
def lend_to_waiting(order: Rows, here: BoolArray, left: int, min_gpus: IntArray, shares: IntArray) -> int:
    """GPUs nobody is due go to jobs without any, in this order; returns how many are left."""
    for i in order:
        if here[i] and shares[i] == 0 and 0 < min_gpus[i] <= left:
            shares[i] = min_gpus[i]
            left -= min_gpus[i]
    return left
