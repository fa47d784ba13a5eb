"""Sharing GPUs out in whole numbers between gangs and pools, and inside a pool by AFS.

A pool is all the jobs of one user, on one GPU type, that can change size: it can use any number of GPUs. So
pools and rigid gangs are ordered by pass as jobs are under stride; a gang takes its size or is passed over,
a pool takes the whole GPUs it is due, the fraction being carried over to the next time.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from shoal.policies.afs_l import afs_l_shares
from shoal.policies.fair.kernels import NO_RATE, BoolArray, FloatArray, IntArray
from shoal.policies.tournament import BY_COIN, BY_LENGTH, hand_out

Rows = NDArray[np.int64]


@njit(cache=True)
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
            key[m], what[m] = pool_lag[u] / max(pool_rate[u], NO_RATE), u
            m += 1
    order = np.argsort(key[:m], kind="mergesort")
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


@njit(cache=True)
def share_by_gain(
    rows: Rows,
    gpus: int,
    now_gpus: IntArray,
    kept: BoolArray,
    turns: FloatArray,
    first_start_s: FloatArray,
    speeds: FloatArray,
    at: IntArray,
    min_gpus: IntArray,
    cap: IntArray,
    nonce: int,
    shares: IntArray,
) -> None:
    """AFS-P inside a pool: those inside their quantum keep theirs while jobs outnumber the GPUs, the others
    follow by turns had; what is left goes to where it gains most, a coin deciding where nobody can know."""
    n = len(rows)
    left = gpus
    first = np.empty(n)
    had = np.empty(n)
    holding = 0
    for k in range(n):
        first[k] = first_start_s[rows[k]]
        if kept[rows[k]]:
            holding += now_gpus[rows[k]]
    keeps = n >= gpus and holding <= gpus
    if keeps:
        for i in rows:
            if kept[i]:
                shares[i] = now_gpus[i]
                left -= now_gpus[i]
    by_start = np.argsort(first, kind="mergesort")
    for k in range(n):
        had[k] = turns[rows[by_start[k]]]
    for k in np.argsort(had, kind="mergesort"):
        i = rows[by_start[k]]
        if shares[i] == 0 and min_gpus[i] <= left:
            shares[i] = min_gpus[i]
            left -= min_gpus[i]
    _hand_out(rows, left, keeps, kept, speeds, at, cap, nonce, shares)


@njit(cache=True)
def _hand_out(
    rows: Rows,
    left: int,
    keeps: bool,
    kept: BoolArray,
    speeds: FloatArray,
    at: IntArray,
    cap: IntArray,
    nonce: int,
    shares: IntArray,
) -> None:
    if left <= 0:
        return
    grow = np.empty(len(rows), np.int32)
    m = 0
    for i in rows:
        if 0 < shares[i] < cap[i] and not (keeps and kept[i]):
            grow[m] = i
            m += 1
    if m > 0:
        hand_out(shares, grow[:m], np.ones(len(shares)), speeds, at, cap, left, BY_COIN, nonce)


@njit(cache=True)
def share_pools(
    pool: IntArray,
    granted: IntArray,
    by_length: bool,
    remaining: FloatArray,
    now_gpus: IntArray,
    kept: BoolArray,
    turns: FloatArray,
    first_start_s: FloatArray,
    speeds: FloatArray,
    at: IntArray,
    min_gpus: IntArray,
    cap: IntArray,
    nonce: int,
    shares: IntArray,
) -> None:
    """Shares of the jobs of each pool out of its grant; `pool[row]` is -1 for rows in none."""
    pools = len(granted)
    start = np.zeros(pools + 1, np.int64)
    for i in range(len(pool)):
        if pool[i] >= 0:
            start[pool[i] + 1] += 1
    for p in range(pools):
        start[p + 1] += start[p]
    rows = np.empty(start[-1], np.int64)
    fill = start[:-1].copy()
    for i in range(len(pool)):
        if pool[i] >= 0:
            rows[fill[pool[i]]] = i
            fill[pool[i]] += 1
    for p in range(pools):
        mine = rows[start[p] : start[p + 1]]
        if len(mine) == 0 or granted[p] == 0:
            continue
        if by_length:
            out = afs_l_shares(remaining[mine], speeds, at[mine], min_gpus[mine], cap[mine], granted[p])
            for k in range(len(mine)):
                shares[mine[k]] = out[k]
        else:
            share_by_gain(
                mine,
                granted[p],
                now_gpus,
                kept,
                turns,
                first_start_s,
                speeds,
                at,
                min_gpus,
                cap,
                nonce,
                shares,
            )


@njit(cache=True)
def lend(
    order: Rows,
    elastic: BoolArray,
    here: BoolArray,
    left: int,
    by_length: bool,
    remaining: FloatArray,
    speeds: FloatArray,
    at: IntArray,
    min_gpus: IntArray,
    cap: IntArray,
    nonce: int,
    shares: IntArray,
) -> None:
    """GPUs nobody is due go to whoever can use them: jobs without any by pass, then by AFS over all users."""
    for i in order:
        if here[i] and shares[i] == 0 and 0 < min_gpus[i] <= left:
            shares[i] = min_gpus[i]
            left -= min_gpus[i]
    if left <= 0:
        return
    grow = np.empty(len(shares), np.int32)
    m = 0
    for i in range(len(shares)):
        if here[i] and elastic[i] and 0 < shares[i] < cap[i]:
            grow[m] = i
            m += 1
    if m > 0:
        if by_length:
            hand_out(shares, grow[:m], remaining, speeds, at, cap, left, BY_LENGTH, 0)
        else:
            hand_out(shares, grow[:m], np.ones(len(shares)), speeds, at, cap, left, BY_COIN, nonce)
