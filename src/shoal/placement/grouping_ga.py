"""Liquid's batch mode: a grouping genetic algorithm over whole plans (TPDS'21).

A chromosome is a plan for all waiting jobs. Its groups are the nodes, and the operators move whole nodes, so
that good groups stay together. It maximises

    GeneticFitness = - sum over jobs of Score - NumNU         (NumNU: nodes used)

Tournaments choose the parents. Crossover inserts a node of one plan into another, deletes the nodes that
would hold a container twice, and places the containers of the deleted nodes by first fit. Mutation deletes a
node. The parameters are those of the authors' code. The search starts from best-fit plans and keeps the best
plan found, so it is never worse than best fit. It ends after a number of generations without improvement or
a number of evaluated plans. Unlike the authors' limit of 30 seconds, this gives the same result on every machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shoal.core.cluster import Cluster
from shoal.core.compiled import kernel
from shoal.core.errors import ShoalError, did_you_mean
from shoal.placement import ga_kernels as ga
from shoal.placement.best_fit import BestFit, best_fit, check_used
from shoal.placement.liquid_score import DOMAIN_HOP, FAR_HOP, LAMBDA, RACK_HOP, ContainerPlacement, Containers
from shoal.placement.placer import Unplaced
from shoal.placement.topology import Topology
from shoal.placement.validate import amount, whole

IntArray = NDArray[np.int32]
FloatArray = NDArray[np.float64]
Rng = np.random.Generator

OPERATORS = ("nearest", "paper", "code")
NEAREST, PAPER, CODE = range(3)

#: starts, ps_of_job, cost or hops, cheapest link, bandwidth, ring_rank, used, used / total, total
_BatchArrays = tuple[
    IntArray, IntArray, FloatArray, FloatArray, FloatArray, IntArray, IntArray, FloatArray, IntArray
]


@dataclass(frozen=True, slots=True)
class Search:
    """Parameters of the search. Population, stagnation and rates are those of the authors' code."""

    #: "paper": the operators of the paper. "nearest": the same, but containers that lose their node go where
    #: they cost least instead of first fit, which finds much better plans. "code": operators and objective
    #: of the authors' code.
    operators: str = "nearest"
    lam: float = LAMBDA
    population: int = 30  #: plus half the number of containers
    stagnation: int = 30  #: generations without improvement, plus the number of containers
    tournament: int = 3
    crossover: float = 0.7
    mutation: float = 0.5
    max_plans: int = 60_000

    def __post_init__(self) -> None:
        if self.operators not in OPERATORS:
            raise ShoalError(
                f"there are no operators {self.operators!r}; {did_you_mean(self.operators, OPERATORS)}"
            )
        for name in ("lam", "crossover", "mutation"):
            amount({"lam": "lambda"}.get(name, f"the rate of {name}"), getattr(self, name), 0.0, 1.0)
        whole("the population", self.population, 2, 100_000)
        whole("generations without improvement", self.stagnation, 0)
        whole("the contestants of a tournament", self.tournament, 1, 1000)
        whole("the plans to look at", self.max_plans, 0)

    def population_for(self, containers: int) -> int:
        return self.population + containers // 2


@dataclass(frozen=True, eq=False)
class Batch:
    """The jobs of one batch as arrays. Containers are ordered by job, servers first."""

    jobs: tuple[Containers, ...]
    starts: IntArray
    ps_of_job: IntArray
    bandwidth: FloatArray
    total: IntArray
    used: IntArray
    cost: FloatArray
    hops: FloatArray
    ring_rank: IntArray

    @classmethod
    def of(cls, cluster: Cluster, jobs: Sequence[Containers], used: IntArray) -> Batch:
        return cls.on(Topology.of(cluster), jobs, cluster.gpus_of_node.astype(np.int32), used)

    @classmethod
    def on(cls, topology: Topology, jobs: Sequence[Containers], total: IntArray, used: IntArray) -> Batch:
        """A batch on the nodes of a topology with `total` GPUs each."""
        hop = Topology(
            topology.rack_of_node,
            topology.domain_of_node,
            np.full_like(topology.rack_cost, RACK_HOP),
            np.full_like(topology.domain_cost, DOMAIN_HOP),
            FAR_HOP,
        )
        return cls(
            tuple(jobs),
            np.concatenate([[0], np.cumsum([j.total for j in jobs])]).astype(np.int32),
            np.array([j.ps for j in jobs], np.int32),
            np.array([j.bandwidth for j in jobs], np.float64),
            total,
            used.astype(np.int32),
            topology.matrix(),
            hop.matrix(),
            np.argsort(np.lexsort((topology.rack_of_node, topology.domain_of_node))).astype(np.int32),
        )

    @property
    def capacity(self) -> IntArray:
        return np.asarray(self.total - self.used, np.int32)

    def value(self, node_of: IntArray, search: Search) -> float:
        """The objective, to be minimised."""
        if search.operators == "code":
            return ga.code_value(
                node_of, self.starts, self.ps_of_job, self.hops, self.bandwidth, self.used, self.total
            )
        return ga.paper_value(
            node_of,
            self.starts,
            self.ps_of_job,
            self.cost,
            self.ring_rank,
            self.used / self.total,
            self.total,
            search.lam,
        )

    def spots(self, node_of: IntArray) -> tuple[ContainerPlacement, ...]:
        """The plan by job."""
        out = []
        for job, low, high in zip(self.jobs, self.starts[:-1].tolist(), self.starts[1:].tolist()):
            nodes = tuple(node_of[low:high].tolist())
            out.append(ContainerPlacement(nodes[: job.ps], nodes[job.ps :], float("nan")))
        return tuple(out)


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """The placement of each job of the batch, and its value compared with best fit (lower is better)."""

    spots: tuple[ContainerPlacement | Unplaced, ...]
    value: float
    best_fit_value: float
    generations: int


def best_fit_plan(
    cluster: Cluster, jobs: Sequence[Containers], used: IntArray, variant: BestFit = BestFit.REMOVE_FULL
) -> IntArray | None:
    """The best-fit plan: one job after another, as nodes of the batch's containers; None if a job fails."""
    used = used.copy()
    nodes: list[int] = []
    topology = Topology.of(cluster)
    for job in jobs:
        spot = best_fit(cluster, job, used, variant=variant, topology=topology)
        if isinstance(spot, Unplaced):
            return None
        nodes += [*spot.ps_nodes, *spot.worker_nodes]
        np.add.at(used, [*spot.ps_nodes, *spot.worker_nodes], 1)
    return np.array(nodes, np.int32)


def place_batch(
    cluster: Cluster, jobs: Sequence[Containers], used: IntArray, rng: Rng, search: Search | None = None
) -> BatchPlan:
    """A plan for all jobs of a batch. While they do not fit together, a random job is left to the next batch."""
    search = search or Search()
    check_used(cluster.gpus_of_node, used)
    free = int((cluster.gpus_of_node - used).sum())
    taken = list(range(len(jobs)))
    while sum(jobs[j].total for j in taken) > free:
        taken.pop(int(rng.integers(len(taken))))
    spots: list[ContainerPlacement | Unplaced] = [
        Unplaced(f"the batch does not fit on {free} free GPUs; it waits for the next") for _ in jobs
    ]
    if not taken:
        return BatchPlan(tuple(spots), 0.0, 0.0, 0)
    batch = Batch.of(cluster, [jobs[j] for j in taken], used)
    seeds = [
        plan
        for variant in (BestFit.REMOVE_FULL, BestFit.AUTHORS_CODE)
        if (plan := best_fit_plan(cluster, batch.jobs, used, variant)) is not None
    ]
    node_of, value, generations = evolve(batch, seeds, rng, search)
    for j, spot in zip(taken, batch.spots(node_of)):
        spots[j] = spot
    return BatchPlan(tuple(spots), value, min(batch.value(s, search) for s in seeds), generations)


def evolve(batch: Batch, seeds: Sequence[IntArray], rng: Rng, search: Search) -> tuple[IntArray, float, int]:
    """(node of each container, its value, generations) of the best plan found."""
    containers, capacity = int(batch.starts[-1]), batch.capacity
    size = search.population_for(containers)
    state = ga.seeded(rng)
    plans = np.empty((size, containers), np.int32)
    for i in range(size):
        plans[i] = seeds[i] if i < len(seeds) else ga.start_plan(state, containers, capacity, i % 2 == 0)
    cost = batch.hops if search.operators == "code" else batch.cost
    arrays = (
        batch.starts,
        batch.ps_of_job,
        cost,
        (cost + np.diag(np.full(len(cost), cost.max()))).min(axis=0),
        batch.bandwidth,
        batch.ring_rank,
        batch.used,
        batch.used / batch.total,
        batch.total,
    )
    return _evolve(
        state,
        plans,
        arrays,
        OPERATORS.index(search.operators),
        float(search.lam),
        search.stagnation + containers,
        search.tournament,
        float(search.crossover),
        float(search.mutation),
        search.max_plans,
    )


@kernel
def _tournament(rng: ga.Rng, values: FloatArray, contestants: int, other_than: int) -> int:
    best = -1
    for _ in range(contestants):
        i = ga.draw(rng, len(values))
        while i == other_than:
            i = ga.draw(rng, len(values))
        if best < 0 or values[i] < values[best]:
            best = i
    return best


@kernel
def _value(plan: IntArray, batch: _BatchArrays, operators: int, lam: float) -> float:
    starts, ps_of_job, cost, _, bandwidth, ring_rank, used, used_part, total = batch
    if operators == CODE:
        return ga.code_value(plan, starts, ps_of_job, cost, bandwidth, used, total)
    return ga.paper_value(plan, starts, ps_of_job, cost, ring_rank, used_part, total, lam)


@kernel
def _cross(
    rng: ga.Rng,
    plan: IntArray,
    order: IntArray,
    k: int,
    donor: IntArray,
    node: int,
    batch: _BatchArrays,
    operators: int,
    lam: float,
) -> int:
    """Insert the donor's `node` into the plan in place. Returns the number of groups, 0 or less on failure."""
    starts, ps_of_job, cost, link, _, _, used, used_part, total = batch
    capacity, nodes = total - used, len(total)
    if operators == PAPER:
        return ga.insert_group(plan, order, k, donor, node, ga.draw(rng, k + 1), capacity)
    if operators == CODE:
        valid = ga.code_crossover(rng, plan, donor, node, capacity)
    else:
        k = ga.take_group(plan, order, k, donor, node, k, nodes)
        jobs = ga.shuffled(rng, len(ps_of_job))
        valid = ga.nearest_fit(plan, jobs, starts, ps_of_job, cost, link, used_part, total, lam, capacity)
    return ga.regroup(plan, order, k, nodes) if valid else 0


@kernel
def _mutate(
    rng: ga.Rng, plan: IntArray, order: IntArray, k: int, batch: _BatchArrays, operators: int, lam: float
) -> int:
    """Empty a random node of the plan in place (NEAREST: all nodes of a random job).

    Returns the number of groups, 0 or less on failure.
    """
    starts, ps_of_job, cost, link, _, _, used, used_part, total = batch
    capacity, nodes = total - used, len(total)
    if operators == PAPER:
        return ga.delete_group(plan, order, k, ga.draw(rng, k), capacity)
    if operators == CODE:
        valid = ga.code_mutation(rng, plan, order, k, capacity)
    else:
        jobs = ga.shuffled(rng, len(ps_of_job))
        job = jobs[-1]
        for i in range(starts[job], starts[job + 1]):
            if plan[i] >= 0:
                ga.empty_node(plan, plan[i])
        valid = ga.nearest_fit(plan, jobs, starts, ps_of_job, cost, link, used_part, total, lam, capacity)
    return ga.regroup(plan, order, k, nodes) if valid else 0


@kernel
def _evolve(
    rng: ga.Rng,
    plans: IntArray,
    batch: _BatchArrays,
    operators: int,
    lam: float,
    stagnation: int,
    contestants: int,
    crossover: float,
    mutation: float,
    max_plans: int,
) -> tuple[IntArray, float, int]:
    size, nodes = len(plans), len(batch[-1])
    orders = np.zeros((size, nodes), np.int32)
    groups = np.zeros(size, np.int32)
    values = np.empty(size)
    for i in range(size):
        groups[i] = ga.regroup(plans[i], orders[i], 0, nodes)
        values[i] = _value(plans[i], batch, operators, lam)
    best = int(np.argmin(values))
    best_plan, best_value = plans[best].copy(), values[best]
    next_plans, next_orders, next_groups = plans.copy(), orders.copy(), groups.copy()
    next_values = values.copy()
    generation = still = 0
    looked_at = size
    while still < stagnation and looked_at + size <= max_plans:
        for i in range(size):
            a = _tournament(rng, values, contestants, -1)
            b = _tournament(rng, values, contestants, a)
            plan, order = next_plans[i], next_orders[i]
            ga.copy(plan, plans[a])
            ga.copy(order, orders[a])
            k, changed = groups[a], False
            if ga.draw(rng, 1 << 30) < crossover * (1 << 30):
                node = orders[b][ga.draw(rng, groups[b])]
                k, changed = _cross(rng, plan, order, k, plans[b], node, batch, operators, lam), True
            if k > 0 and ga.draw(rng, 1 << 30) < mutation * (1 << 30):
                k, changed = _mutate(rng, plan, order, k, batch, operators, lam), True
            if k <= 0:  # not a valid plan: keep the parent instead
                ga.copy(plan, plans[a])
                ga.copy(order, orders[a])
                k, changed = groups[a], False
            next_groups[i] = k
            next_values[i] = _value(plan, batch, operators, lam) if changed else values[a]
        plans, next_plans = next_plans, plans
        orders, next_orders = next_orders, orders
        groups, next_groups = next_groups, groups
        values, next_values = next_values, values
        generation += 1
        looked_at += size
        still += 1
        best = int(np.argmin(values))
        if values[best] < best_value:
            if values[best] < best_value - 1e-6:
                still = 0
            best_plan, best_value = plans[best].copy(), values[best]
    return best_plan, best_value, generation
