"""The GPUs that every job is due on average.

A user's share of a GPU type is divided among its jobs of that type. A job is due `due` GPUs on average. Its lag is
the GPU time that it received beyond its due, relative to the other jobs of its user. In terms of stride
scheduling, lag / due is the job's pass minus the mean pass of its user's jobs. Storing lags instead of passes means
that a change of tickets changes only the dues.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shoal.core.arrays import FloatArray, IntArray
from shoal.core.compiled import kernel
from shoal.core.water_filling import water_fill_into
from shoal.policies.gandiva_fair.tables import Claims

#: The due of a job whose user has no share of the job's GPU type. It avoids a division by zero.
NO_DUE = 1e-9


@kernel
def demand_of_users(claims: Claims, users: int, types: int) -> FloatArray:
    """[user, type]: GPUs that all active jobs would use if all of them ran."""
    demand = np.zeros((users, types))
    for i in range(len(claims.user)):
        if claims.active[i] and claims.gpu_type[i] >= 0:
            demand[claims.user[i], claims.gpu_type[i]] += claims.size[i]
    return demand


@kernel
def rows_by_group(group: IntArray, groups: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(start, rows): rows[start[g]:start[g + 1]] are the rows of group g, in order. Groups below 0 are left out."""
    start = np.zeros(groups + 1, np.int64)
    for i in range(len(group)):
        if group[i] >= 0:
            start[group[i] + 1] += 1
    for g in range(groups):
        start[g + 1] += start[g]
    rows = np.empty(start[-1], np.int64)
    at = start[:-1].copy()
    for i in range(len(group)):
        if group[i] >= 0:
            rows[at[group[i]]] = i
            at[group[i]] += 1
    return start, rows


@kernel
def dues(claims: Claims, weights: FloatArray, gpus_of_type: IntArray) -> FloatArray:
    """GPUs that each job is due on average.

    Two water-fillings: first over the users by `weights[user, type]`, capped by the demand of their jobs; then over
    the jobs of each user by the jobs' weights (1 by default), capped by the gang size.
    """
    users, types = weights.shape
    n = len(claims.user)
    demand = demand_of_users(claims, users, types)
    share = np.zeros((users, types))
    column, caps, out = np.empty(users), np.empty(users), np.empty(users)
    for t in range(types):
        for u in range(users):
            column[u], caps[u] = weights[u, t], demand[u, t]
        water_fill_into(column, caps, float(gpus_of_type[t]), out)
        for u in range(users):
            share[u, t] = out[u]
    due = np.zeros(n)
    group = np.full(n, -1, np.int32)
    for i in range(n):
        if claims.active[i] and claims.gpu_type[i] >= 0:
            group[i] = claims.user[i] * types + claims.gpu_type[i]
    start, rows = rows_by_group(group, users * types)
    for g in range(users * types):
        mine = rows[start[g] : start[g + 1]]
        m = len(mine)
        weight, size, part = np.empty(m), np.empty(m), np.empty(m)
        for k in range(m):
            weight[k], size[k] = claims.weight[mine[k]], claims.size[mine[k]]
        water_fill_into(weight, size, share[g // types, g % types], part)
        for k in range(m):
            due[mine[k]] = max(part[k], NO_DUE)
    return due


@kernel
def center_lags(
    lag: FloatArray, due: FloatArray, user: IntArray, gpu_type: IntArray, users: int, types: int
) -> None:
    """Shift the passes of each user's jobs on a type so that their lags sum to zero.

    The sum belongs to the user's account (see `accounts`). A new job starts at the mean pass of its user's jobs.
    """
    total, dues_ = np.zeros((users, types)), np.zeros((users, types))
    for i in range(len(lag)):
        if gpu_type[i] >= 0:
            total[user[i], gpu_type[i]] += lag[i]
            dues_[user[i], gpu_type[i]] += due[i]
    for i in range(len(lag)):
        if gpu_type[i] >= 0 and dues_[user[i], gpu_type[i]] > 0.0:
            lag[i] -= due[i] * total[user[i], gpu_type[i]] / dues_[user[i], gpu_type[i]]
