"""Dividing whole GPUs between gangs and pools, and inside a pool by AFS.

A pool consists of all elastic jobs of one user on one GPU type. It can use any number of GPUs. Pools and rigid gangs
are sorted by pass, as in stride scheduling. A gang takes its size or is skipped. A pool takes the whole GPUs that it
is due; the fraction is carried over to the next decision.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from shoal.core.arrays import BoolArray, FloatArray, IntArray
from shoal.core.compiled import inlined, inner, kernel
from shoal.core.stable_order import stable_order
from shoal.policies.afs.afs_l import afs_l_shares
from shoal.policies.afs.afs_p import hand_out_by_gain, start_in_order
from shoal.policies.afs.gains import hand_out_to_gap
from shoal.policies.gandiva_fair.dues import NO_DUE, rows_by_group
from shoal.policies.gandiva_fair.tables import Claims, Rows


class Pools(NamedTuple):
    """One entry per user. All pools are on one GPU type."""

    #: GPUs that the pool is due, the GPU-seconds that it received beyond them, and the GPUs that it can use.
    due: FloatArray
    lag: FloatArray
    most: FloatArray


class Sizes(NamedTuple):
    """Limits and speeds of each row on one GPU type. Row i runs at speeds[at[i] + g] on g GPUs."""

    speeds: FloatArray
    at: IntArray
    min_gpus: IntArray
    most: IntArray


class Turns(NamedTuple):
    """State of AFS-P of each row."""

    gpus: IntArray
    #: Whether the job is in its turn and may keep its share.
    kept: BoolArray
    had: FloatArray
    first_start_s: FloatArray


@kernel
def grant(
    gangs: Rows,
    passed: FloatArray,
    size: IntArray,
    keep: BoolArray,
    pools: Pools,
    quantum_s: float,
    gpus: int,
    shares: IntArray,
) -> IntArray:
    """GPUs of each pool, out of `gpus` of one type. Writes the sizes of the gangs that run to `shares`.

    By ascending pass, gangs before pools among equals. A gang takes its size if that many GPUs are free. A pool takes
    floor(due - lag / quantum). GPUs that are left because of fractions go to pools in the same order, one each. Gangs
    in `keep` are within their quantum and go first.
    """
    pool_rate, pool_lag, pool_cap = pools.due, pools.lag, pools.most
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
    t: int, claims: Claims, rigid: BoolArray, due: FloatArray, type_max: IntArray, users: int
) -> tuple[IntArray, IntArray, FloatArray, FloatArray]:
    """(pool of each row, limit of each row, due of each pool, GPUs that each pool can use) on type t.

    The number of a pool is its user. Gangs and rows on other types are in no pool (-1).
    """
    gpu_type, user, rate, cap = claims.gpu_type, claims.user, due, claims.size
    n = len(gpu_type)
    pool, limit = np.full(n, -1, np.int32), cap.copy()
    pool_due, most = np.zeros(users), np.zeros(users)
    for i in range(n):
        if rigid[i]:
            continue
        limit[i] = min(cap[i], type_max[i])
        if gpu_type[i] == t:
            pool[i] = user[i]
            pool_due[user[i]] += rate[i]
            most[user[i]] += limit[i]
    return pool, limit, pool_due, most


@inner
def _by_turns(rows: Rows, gpus: int, turns: Turns) -> tuple[IntArray, BoolArray]:
    """(positions in `rows` by the number of turns had, which rows keep their share).

    As under AFS-P, jobs in their turn keep their share while there are more jobs than GPUs.
    """
    n = len(rows)
    keep, holding = np.zeros(n, np.bool_), 0
    first, had = np.empty(n), np.empty(n)
    for k in range(n):
        keep[k] = n >= gpus and turns.kept[rows[k]]
        holding += turns.gpus[rows[k]] if keep[k] else 0
        first[k] = turns.first_start_s[rows[k]]
    for k in range(n):
        keep[k] = keep[k] and holding <= gpus
    order = stable_order(first)
    for k in range(n):
        had[k] = turns.had[rows[order[k]]]
    others, m = np.empty(n, np.int32), 0
    for k in stable_order(had):
        if not keep[order[k]]:
            others[m] = order[k]
            m += 1
    return others[:m], keep


@kernel
def share_pools_by_length(
    pool: IntArray, granted: IntArray, remaining: FloatArray, sizes: Sizes, shares: IntArray
) -> None:
    """Shares of the jobs of each pool out of its grant, by AFS-L."""
    start, rows = rows_by_group(pool, len(granted))
    for p in range(len(granted)):
        mine, gpus = rows[start[p] : start[p + 1]], np.int64(granted[p])
        if len(mine) == 0 or gpus == 0:
            continue
        out = afs_l_shares(
            remaining[mine], sizes.speeds, sizes.at[mine], sizes.min_gpus[mine], sizes.most[mine], gpus
        )
        for k in range(len(mine)):
            shares[mine[k]] = out[k]


@inlined
def _those_of(chosen: BoolArray) -> IntArray:
    """`np.flatnonzero` as a loop, which compiles faster."""
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
    pool: IntArray, granted: IntArray, turns: Turns, sizes: Sizes, shares: IntArray
) -> None:
    """Shares of the jobs of each pool out of its grant, by AFS-P."""
    start, rows = rows_by_group(pool, len(granted))
    for p in range(len(granted)):
        mine, gpus = rows[start[p] : start[p + 1]], np.int64(granted[p])
        if len(mine) == 0 or gpus == 0:
            continue
        others, keep = _by_turns(mine, gpus, turns)
        out, started, left = start_in_order(others, keep, turns.gpus[mine], sizes.min_gpus[mine], gpus)
        begin, most = sizes.at[mine], sizes.most[mine]
        if len(others) == len(mine):  # no job keeps its share
            left = hand_out_to_gap(out, sizes.speeds, begin, most, left)
        for line in (started, _those_of(keep)):
            if left > 0:
                hand_out_by_gain(out, line, sizes.speeds, begin, most, left)
                left = int(gpus) - _sum(out)
        for k in range(len(mine)):
            shares[mine[k]] = out[k]


@kernel
def lend_to_waiting(order: Rows, here: BoolArray, left: int, min_gpus: IntArray, shares: IntArray) -> int:
    """Give GPUs that no user is due to jobs that have none, in this order. Returns the number of GPUs left."""
    for i in order:
        if here[i] and shares[i] == 0 and 0 < min_gpus[i] <= left:
            shares[i] = min_gpus[i]
            left -= min_gpus[i]
    return left
