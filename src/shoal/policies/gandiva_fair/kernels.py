"""The hot loops of fair sharing: what every job is due, and who runs in this quantum.

A job is due `rate` GPUs on average. Its `lag` is the GPU time it has had beyond that, next to its user's
other jobs, so that its pass, as stride knows it, is lag / rate past the pass of its user. Keeping the lag
rather than the pass makes a change of tickets a change of the rate and nothing else.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shoal.core.compiled import inner, kernel
from shoal.core.stable_order import stable_order
from shoal.core.water_filling import water_fill_into

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int32]
BoolArray = NDArray[np.bool_]

#: Where a job is bound: a node, nowhere yet, or (below this) entry -3 - home of the gangs that span nodes.
NOWHERE = -1
SPANS = -3
#: The due of a job whose user has none of this type: it runs on what is left, after all others.
NO_RATE = 1e-9


@kernel
def demand_of_users(
    user: IntArray, gpu_type: IntArray, size: IntArray, active: BoolArray, users: int, types: int
) -> FloatArray:
    """[user, type]: GPUs that all active jobs there would hold if all ran; type -1 counts nowhere."""
    demand = np.zeros((users, types))
    for i in range(len(user)):
        if active[i] and gpu_type[i] >= 0:
            demand[user[i], gpu_type[i]] += size[i]
    return demand


@kernel
def rows_by_group(group: IntArray, groups: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(start, rows): the rows of group g are rows[start[g]:start[g + 1]], in order; below 0 is no group."""
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
def due_rates(
    weights: FloatArray,
    gpus_of_type: IntArray,
    user: IntArray,
    gpu_type: IntArray,
    size: IntArray,
    weight: FloatArray,
    active: BoolArray,
) -> FloatArray:
    """GPUs each job is due on average: its user's part of the type, divided among the user's jobs there.

    Both divisions are water-filling: of users by `weights[user, type]`, capped by what their jobs can use;
    of a user's jobs by the weight the owner gives them (1 for all by default), capped by the gang.
    """
    users, types = weights.shape
    n = len(user)
    demand = demand_of_users(user, gpu_type, size, active, users, types)
    share = np.zeros((users, types))
    column, caps, out = np.empty(users), np.empty(users), np.empty(users)
    for t in range(types):
        for u in range(users):
            column[u], caps[u] = weights[u, t], demand[u, t]
        water_fill_into(column, caps, float(gpus_of_type[t]), out)
        for u in range(users):
            share[u, t] = out[u]
    rates = np.zeros(n)
    group = np.full(n, -1, np.int32)
    for i in range(n):
        if active[i] and gpu_type[i] >= 0:
            group[i] = user[i] * types + gpu_type[i]
    start, rows = rows_by_group(group, users * types)
    for g in range(users * types):
        a, b = start[g], start[g + 1]
        if a == b:
            continue
        total = share[g // types, g % types]
        if total >= demand[g // types, g % types]:
            for k in range(a, b):
                rates[rows[k]] = size[rows[k]]
            continue
        group_weight, group_size, group_rate = np.empty(b - a), np.empty(b - a), np.empty(b - a)
        for k in range(a, b):
            group_weight[k - a], group_size[k - a] = weight[rows[k]], size[rows[k]]
        water_fill_into(group_weight, group_size, total, group_rate)
        for k in range(a, b):
            rates[rows[k]] = max(group_rate[k - a], NO_RATE)
    return rates


@kernel
def split_stride(
    order: NDArray[np.int64],
    passed: FloatArray,
    rate: FloatArray,
    size: IntArray,
    home: IntArray,
    span_start: IntArray,
    span_node: IntArray,
    span_gpus: IntArray,
    gpus_of_node: IntArray,
    eligible: BoolArray,
    keep: BoolArray,
) -> tuple[BoolArray, IntArray]:
    """(who runs, GPUs left on each node): one quantum of `split_stride.SplitStride.pick`.

    `order` are all rows by ascending pass, in tie order where equal. Rows in `keep` go on in any case. A gang
    that spans nodes has home SPANS - k and holds span_gpus[j] of span_node[j], span_start[k] <= j < [k+1].
    """
    n, nodes = len(order), len(gpus_of_node)
    free = gpus_of_node.copy()
    runs = keep.copy()
    # Small jobs by node, in the order of their passes; and gangs that span nodes.
    node, spanning = np.full(n, -1, np.int32), 0
    for k in range(n):
        i = order[k]
        if keep[i]:
            if home[i] >= 0:
                free[home[i]] -= size[i]
            elif home[i] <= SPANS:
                _take_span(SPANS - home[i], span_start, span_node, span_gpus, free)
        elif eligible[i]:
            if home[i] >= 0:
                node[k] = home[i]
            elif home[i] <= SPANS:
                spanning += 1
    start, local = rows_by_group(node, nodes)
    for k in range(len(local)):
        local[k] = order[local[k]]
    if spanning == 0:  # nodes do not meet: their order is of no consequence
        for s in range(nodes):
            _run_node(s, start, local, size, free, runs)
        return runs, free
    # The central order: gangs that span nodes and aggregates, by pass; of equals the gangs first.
    key, what, m = np.empty(spanning + nodes), np.empty(spanning + nodes, np.int64), 0
    for i in range(n):
        if eligible[i] and not keep[i] and home[i] <= SPANS:
            key[m], what[m] = passed[i], -1 - i
            m += 1
    for s in range(nodes):
        if start[s + 1] > start[s]:
            key[m], what[m] = _aggregate_pass(local[start[s] : start[s + 1]], passed, rate), s
            m += 1
    for e in stable_order(key[:m]):
        if what[e] >= 0:
            _run_node(what[e], start, local, size, free, runs)
            continue
        k = SPANS - home[-1 - what[e]]
        fits = True
        for j in range(span_start[k], span_start[k + 1]):
            fits = fits and free[span_node[j]] >= span_gpus[j]
        if fits:
            runs[-1 - what[e]] = True
            _take_span(k, span_start, span_node, span_gpus, free)
    return runs, free


@inner
def _take_span(
    k: int, span_start: IntArray, span_node: IntArray, span_gpus: IntArray, free: IntArray
) -> None:
    for j in range(span_start[k], span_start[k + 1]):
        free[span_node[j]] -= span_gpus[j]


@inner
def _aggregate_pass(rows: NDArray[np.int64], passed: FloatArray, rate: FloatArray) -> float:
    """The pass of a node's small jobs taken as one: see `split_stride.aggregate_pass`."""
    tickets, service = 0.0, 0.0
    for i in rows:
        tickets += rate[i]
        service += passed[i] * rate[i]
    return service / tickets


@inner
def _run_node(
    s: int,
    start: NDArray[np.int64],
    local: NDArray[np.int64],
    size: IntArray,
    free: IntArray,
    runs: BoolArray,
) -> None:
    """Gang-aware stride on one node: who fits runs, who does not is passed over and keeps its pass."""
    for k in range(start[s], start[s + 1]):
        if free[s] == 0:
            return
        i = local[k]
        if size[i] <= free[s]:
            runs[i] = True
            free[s] -= size[i]


@kernel
def compare_siblings(
    lag: FloatArray, rate: FloatArray, user: IntArray, gpu_type: IntArray, users: int, types: int
) -> None:
    """Make the lags of a user's jobs on one type add up to nothing, with all their passes moved alike.

    What all of them had too much or too little of is the user's (see `accounts`), whoever of them had it; a
    job that comes new stands where its siblings do on average.
    """
    total, due = np.zeros((users, types)), np.zeros((users, types))
    for i in range(len(lag)):
        if gpu_type[i] >= 0:
            total[user[i], gpu_type[i]] += lag[i]
            due[user[i], gpu_type[i]] += rate[i]
    for i in range(len(lag)):
        if gpu_type[i] >= 0 and due[user[i], gpu_type[i]] > 0.0:
            lag[i] -= rate[i] * total[user[i], gpu_type[i]] / due[user[i], gpu_type[i]]
