"""Kernels of the grouping genetic algorithm: scores and operators on plans as arrays.

A plan is `node_of` (the node of each container) and `order[:k]` (the groups of the chromosome: the nodes in
use, in the order in which first fit tries them). Each container takes one GPU.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shoal.core.compiled import kernel

IntArray = NDArray[np.int32]
FloatArray = NDArray[np.float64]
#: State of the random numbers, from `seeded`. Kernels that use a numpy Generator compile for half a minute.
Rng = NDArray[np.uint64]


def seeded(rng: np.random.Generator) -> Rng:
    """A state drawn from a numpy generator."""
    return rng.integers(0, 2**63, size=1, dtype=np.uint64)


@kernel
def draw(rng: Rng, below: int) -> int:
    """A random integer in 0..below-1, by splitmix64 (Steele, Lea and Flood, OOPSLA'14)."""
    rng[0] += np.uint64(0x9E3779B97F4A7C15)
    z = rng[0]
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z = z ^ (z >> np.uint64(31))
    return int((z >> np.uint64(11)) * (1.0 / 9007199254740992.0) * below)


@kernel
def shuffled(rng: Rng, n: int) -> IntArray:
    """0..n-1 in random order."""
    order = np.arange(n).astype(np.int32)
    for i in range(n - 1, 0, -1):
        j = draw(rng, i + 1)
        order[i], order[j] = order[j], order[i]
    return order


@kernel
def copy(to: IntArray, source: IntArray) -> None:
    for i in range(len(source)):
        to[i] = source[i]


@kernel
def ring_cost(nodes: IntArray, ring_rank: IntArray, cost: FloatArray) -> float:
    """The cost of the cheapest ring through these nodes; `ring_rank` orders nodes by domain and rack."""
    ring = np.empty(len(nodes), np.int32)
    n = 0
    for node in nodes:  # insertion sort, each node once
        at = n
        while at > 0 and ring_rank[ring[at - 1]] > ring_rank[node]:
            at -= 1
        if at > 0 and ring[at - 1] == node:
            continue
        for i in range(n, at, -1):
            ring[i] = ring[i - 1]
        ring[at] = node
        n += 1
    total = 0.0
    for i in range(n):
        total += cost[ring[i], ring[(i + 1) % n]]
    return total


@kernel
def paper_value(
    node_of: IntArray,
    starts: IntArray,
    ps_of_job: IntArray,
    cost: FloatArray,
    ring_rank: IntArray,
    used_part: FloatArray,
    total: IntArray,
    lam: float,
) -> float:
    """Sum of Score + NumNU of the Liquid paper, which is minus its GeneticFitness.

    The containers of job j are starts[j]..starts[j+1], servers first; used_part is UsedGPU / TotalGPU.
    """
    network = fitness = 0.0
    last_job = np.full(len(total), -1, np.int32)
    nodes = 0
    for job in range(len(starts) - 1):
        low, high = starts[job], starts[job + 1]
        first_worker = low + ps_of_job[job]
        if ps_of_job[job] == 0:
            network += ring_cost(node_of[low:high], ring_rank, cost)
        for i in range(low, high):
            node = node_of[i]
            if i < first_worker:
                for worker in range(first_worker, high):
                    network += cost[node, node_of[worker]]
            if last_job[node] < 0:
                nodes += 1
            if last_job[node] != job:
                last_job[node] = job
                fitness -= used_part[node]
            fitness -= 1.0 / total[node]
    return lam * network + (1 - lam) * fitness + nodes


@kernel
def code_value(
    node_of: IntArray,
    starts: IntArray,
    ps_of_job: IntArray,
    hops: FloatArray,
    bandwidth: FloatArray,
    used: IntArray,
    total: IntArray,
) -> float:
    """The objective of the authors' code: its evaluator for the whole batch, plus nodes per task."""
    network = load = 0.0
    last_job = np.full(len(total), -1, np.int32)
    nodes = pairs = 0
    for job in range(len(starts) - 1):
        low, high = starts[job], starts[job + 1]
        first_worker = low + ps_of_job[job]
        for i in range(low, high):
            node = node_of[i]
            if i < first_worker:
                for worker in range(first_worker, high):
                    network += bandwidth[job] * hops[node, node_of[worker]]
            nodes += last_job[node] < 0
            pairs += last_job[node] != job
            last_job[node] = job
            load += (2.0 + used[node]) / total[node]
    return network + (pairs - load + nodes) / len(node_of)


@kernel
def _free_of(node_of: IntArray, capacity: IntArray) -> IntArray:
    free = capacity.copy()
    for node in node_of:
        if node >= 0:
            free[node] -= 1
    return free


@kernel
def _first_fit(node_of: IntArray, order: IntArray, k: int, capacity: IntArray, avoid: int) -> int:
    """Put every container without a node on the first group with room; add nodes if no group has room.

    Returns the number of groups; -1 if a container fits nowhere. `avoid` is added only as a last resort.
    """
    free = _free_of(node_of, capacity)
    in_order = np.zeros(len(capacity), np.bool_)
    for position in range(k):
        in_order[order[position]] = True
    first = 0  # groups before this one are full: all containers are equal
    for i in range(len(node_of)):
        if node_of[i] >= 0:
            continue
        while first < k and free[order[first]] == 0:
            first += 1
        if first == k:
            node = -1
            for candidate in range(len(capacity)):
                if not in_order[candidate] and candidate != avoid and free[candidate] > 0:
                    node = candidate
                    break
            if node < 0 and avoid >= 0 and not in_order[avoid] and free[avoid] > 0:
                node = avoid
            if node < 0:
                return -1
            order[k] = node
            in_order[node] = True
            k += 1
        node_of[i] = order[first]
        free[order[first]] -= 1
    return k


@kernel
def nearest_fit(
    node_of: IntArray,
    jobs: IntArray,
    starts: IntArray,
    ps_of_job: IntArray,
    cost: FloatArray,
    link: FloatArray,
    used_part: FloatArray,
    total: IntArray,
    lam: float,
    capacity: IntArray,
) -> bool:
    """Put every container without a node where it adds least to the value of the plan, job by job.

    Each container of the job that would not fit on the same node counts as one cheapest link (`link`, by
    node). An all-reduce job is attracted to its other workers.
    """
    free = _free_of(node_of, capacity)
    for job in jobs:
        low, high = starts[job], starts[job + 1]
        waiting = 0
        for i in range(low, high):
            waiting += node_of[i] < 0
        for i in range(low, high):
            if node_of[i] >= 0:
                continue
            best, best_added = -1, 0.0
            for node in range(len(capacity)):
                if free[node] > 0:
                    added = _added(node_of, i, node, low, high, ps_of_job[job], cost, lam)
                    added += lam * link[node] * max(0, waiting - free[node])
                    added += 1.0 if free[node] == capacity[node] else 0.0
                    added -= (1 - lam) / total[node]
                    if best >= 0 and added - (1 - lam) * used_part[node] >= best_added:
                        continue
                    if not _uses(node_of, low, high, node):
                        added -= (1 - lam) * used_part[node]
                    if best < 0 or added < best_added:
                        best, best_added = node, added
            if best < 0:
                return False
            node_of[i] = best
            free[best] -= 1
            waiting -= 1
    return True


@kernel
def _added(
    node_of: IntArray, i: int, node: int, low: int, high: int, ps: int, cost: FloatArray, lam: float
) -> float:
    """λ times the cost from container `i` on `node` to the containers of its job that it communicates with."""
    if ps > 0:
        low, high = (low + ps, high) if i < low + ps else (low, low + ps)
    added = 0.0
    for other in range(low, high):
        if node_of[other] >= 0:
            added += cost[node, node_of[other]]
    return lam * added


@kernel
def _uses(node_of: IntArray, low: int, high: int, node: int) -> bool:
    found = False
    for i in range(low, high):
        found |= node_of[i] == node
    return found


@kernel
def insert_group(
    node_of: IntArray, order: IntArray, k: int, donor: IntArray, node: int, at: int, capacity: IntArray
) -> int:
    """Crossover of the paper, in place: insert the donor's group `node` before position `at`.

    Groups that hold one of its containers are deleted, and their other containers are placed by first fit.
    Returns the number of groups; -1 on failure.
    """
    k = take_group(node_of, order, k, donor, node, at, len(capacity))
    return _first_fit(node_of, order, k, capacity, -1)


@kernel
def take_group(
    node_of: IntArray, order: IntArray, k: int, donor: IntArray, node: int, at: int, nodes: int
) -> int:
    """The first half of `insert_group`: the containers of the deleted groups stay without a node."""
    drop = np.zeros(nodes, np.bool_)
    drop[node] = True
    for i in range(len(node_of)):
        if donor[i] == node:
            drop[node_of[i]] = True
    for i in range(len(node_of)):
        if donor[i] == node:
            node_of[i] = node
        elif drop[node_of[i]]:
            node_of[i] = -1
    left = np.empty(nodes, np.int32)
    n = 0
    for position in range(k + 1):
        if position == at:
            left[n] = node
            n += 1
        if position < k and not drop[order[position]]:
            left[n] = order[position]
            n += 1
    for position in range(n):
        order[position] = left[position]
    return n


@kernel
def delete_group(node_of: IntArray, order: IntArray, k: int, at: int, capacity: IntArray) -> int:
    """Mutation of the paper, in place: delete the group at position `at`, place its containers by first fit."""
    node = order[at]
    empty_node(node_of, node)
    for position in range(at, k - 1):
        order[position] = order[position + 1]
    return _first_fit(node_of, order, k - 1, capacity, node)


@kernel
def empty_node(node_of: IntArray, node: int) -> None:
    """Remove all containers from a node."""
    for i in range(len(node_of)):
        if node_of[i] == node:
            node_of[i] = -1


@kernel
def _random_fit(rng: Rng, node_of: IntArray, capacity: IntArray) -> bool:
    """Put every container without a node on a random node with room. Returns whether all found one."""
    free = _free_of(node_of, capacity)
    room = np.empty(len(free), np.int32)
    n = 0
    for node in range(len(free)):
        if free[node] > 0:
            room[n] = node
            n += 1
    for i in range(len(node_of)):
        if node_of[i] >= 0:
            continue
        if n == 0:
            return False
        pick = draw(rng, n)
        node = room[pick]
        node_of[i] = node
        free[node] -= 1
        if free[node] == 0:
            n -= 1
            room[pick] = room[n]
    return True


@kernel
def regroup(node_of: IntArray, order: IntArray, k: int, nodes: int) -> int:
    """Update the groups to the nodes in use: old groups keep their order, new ones follow."""
    seen = np.zeros(nodes, np.int8)
    for node in node_of:
        seen[node] = 1
    n = 0
    for position in range(k):
        if seen[order[position]] == 1:
            seen[order[position]] = 2
            order[n] = order[position]
            n += 1
    for node in node_of:
        if seen[node] == 1:
            seen[node] = 2
            order[n] = node
            n += 1
    return n


@kernel
def code_crossover(rng: Rng, node_of: IntArray, donor: IntArray, node: int, capacity: IntArray) -> bool:
    """Crossover of the authors' code: `node` is copied from the donor, evicted containers go to random nodes."""
    for i in range(len(node_of)):
        if donor[i] == node:
            node_of[i] = node
        elif node_of[i] == node:
            node_of[i] = -1
    return _random_fit(rng, node_of, capacity)


@kernel
def code_mutation(rng: Rng, node_of: IntArray, order: IntArray, k: int, capacity: IntArray) -> bool:
    """Mutation of the authors' code: a node is emptied, its containers go to random nodes."""
    rounds = 1 + draw(rng, max(1, len(capacity) // 100))
    for _ in range(rounds):
        empty_node(node_of, order[draw(rng, k)])
        if not _random_fit(rng, node_of, capacity):
            return False
    return True


@kernel
def start_plan(rng: Rng, containers: int, capacity: IntArray, first_fit: bool) -> IntArray:
    """An initial plan: first fit over the nodes in random order, or random fit."""
    node_of = np.full(containers, -1, np.int32)
    if not first_fit:
        _random_fit(rng, node_of, capacity)
        return node_of
    order = shuffled(rng, len(capacity))
    _first_fit(node_of, order, len(order), capacity, -1)
    return node_of
