"""The score of a placement of containers: that of the Liquid paper, and that of the authors' code.

The paper minimises for each job k (TPDS'21, equations for cost, fitness and score)

    Score_k   = λ Cost_k + (1 - λ) sum of Fitness_j over the nodes j that k uses
    Fitness_j = -(ReqGPU_j + UsedGPU_j) / TotalGPU_j

which prefers little traffic and full nodes. The paper does not give λ; the default here is 0.5. ReqGPU_j is
the number of GPUs that the job takes on node j, UsedGPU_j the number in use before.

The authors' code instead minimises, over the tasks in the order of placement,

    network + spread * load / tasks + (distinct pairs of job and node) / tasks
    network = bandwidth * (1 same rack + 4 same domain + 40 other domain), per pair of opposite roles
    load    = sum of (1 + allocated_j + gpus) / total_j
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shoal.placement.topology import Topology
from shoal.placement.validate import amount, whole

IntArray = NDArray[np.int32]
FloatArray = NDArray[np.float64]

LAMBDA = 0.5
#: Cost per pair in the authors' code: other node of the rack, other rack, other domain.
RACK_HOP, DOMAIN_HOP, FAR_HOP = 1.0, 4.0, 40.0


@dataclass(frozen=True, slots=True)
class Containers:
    """A job as Liquid places it: parameter servers and workers, each on one GPU.

    Without servers it is an all-reduce job. `bandwidth` is the predicted class; the authors' score uses it.
    """

    ps: int
    workers: int
    bandwidth: float = 1.0

    def __post_init__(self) -> None:
        whole("the servers of a job", self.ps, 0)
        whole("the workers of a job", self.workers, 1)
        amount("the bandwidth of a job", self.bandwidth, 0.0, 1e12)

    @property
    def total(self) -> int:
        return self.ps + self.workers

    def roles(self) -> list[bool]:
        """The placement order, True for a server. Servers are interleaved evenly with workers."""
        roles: list[bool] = []
        ps = workers = 0
        while ps + workers < self.total:
            due = ps * (self.workers / (self.ps + 0.001)) <= workers
            is_ps = ps < self.ps and (due or workers == self.workers)
            roles.append(is_ps)
            ps, workers = ps + is_ps, workers + (not is_ps)
        return roles


@dataclass(frozen=True, slots=True)
class ContainerPlacement:
    """The nodes of the containers of one job, and the score."""

    ps_nodes: tuple[int, ...]
    worker_nodes: tuple[int, ...]
    score: float

    @property
    def nodes(self) -> tuple[int, ...]:
        return tuple(sorted({*self.ps_nodes, *self.worker_nodes}))


def job_cost(topology: Topology, ps_nodes: Sequence[int], worker_nodes: Sequence[int]) -> float:
    """Cost_k: pairs of server and worker, or the ring of an all-reduce job."""
    if ps_nodes:
        return topology.server_cost(ps_nodes, worker_nodes)
    return topology.ring_cost(worker_nodes)


def job_score(
    topology: Topology,
    total: IntArray,
    used: IntArray,
    ps_nodes: Sequence[int],
    worker_nodes: Sequence[int],
    lam: float = LAMBDA,
) -> float:
    """Score_k of the paper."""
    on_node = np.bincount([*ps_nodes, *worker_nodes], minlength=len(total))
    mine = on_node > 0
    fitness = -float(((on_node[mine] + used[mine]) / total[mine]).sum())
    return lam * job_cost(topology, ps_nodes, worker_nodes) + (1 - lam) * fitness


def hops_to(topology: Topology, others: Iterable[int]) -> FloatArray:
    """For each node, the authors' network cost of communicating with `others`."""
    hops = Topology(
        topology.rack_of_node,
        topology.domain_of_node,
        np.full_like(topology.rack_cost, RACK_HOP),
        np.full_like(topology.domain_cost, DOMAIN_HOP),
        FAR_HOP,
    )
    return hops.cost_to(np.fromiter(others, np.int32))


def code_cost(
    topology: Topology,
    total: IntArray,
    allocated: IntArray,
    ps_nodes: Sequence[int],
    worker_nodes: Sequence[int],
    bandwidth: float = 1.0,
    spread: float = -1.0,
) -> float:
    """The score of one job by the authors' evaluator, if nothing else is allocated meanwhile."""
    nodes = [*ps_nodes, *worker_nodes]
    network = bandwidth * float(sum(hops_to(topology, ps_nodes)[w] for w in worker_nodes))
    load = float(((2 + allocated[nodes]) / total[nodes]).sum())
    return network + (spread * load + len(set(nodes))) / len(nodes)
