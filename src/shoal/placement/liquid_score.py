"""How good a placement of containers is: the score of the Liquid paper, and the one of its code.

The paper minimises, for each job k (TPDS'21, its equations for cost, fitness and score),

    Score_k   = λ Cost_k + (1 - λ) sum of Fitness_j over the nodes j that k uses
    Fitness_j = -(ReqGPU_j + UsedGPU_j) / TotalGPU_j

so that little traffic and well filled nodes are good. λ is not given; 0.5 is the default here. ReqGPU_j is
what the job itself wants of node j, UsedGPU_j what was in use before.

The authors' code minimises instead, over the tasks in the order they are placed,

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
#: What the authors' code charges per pair: other node of the rack, other rack, other domain.
RACK_HOP, DOMAIN_HOP, FAR_HOP = 1.0, 4.0, 40.0


@dataclass(frozen=True, slots=True)
class Containers:
    """A job as Liquid places it: parameter servers and workers, each on one GPU.

    Without servers it is an all-reduce job. `bandwidth` is the predicted class, used by the authors' score.
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
        """True for a server: servers and workers take turns, so that servers are spread among workers."""
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
    """Where the containers of one job are, and what that scored."""

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
    """For each node, the code's network charge for talking to `others`."""
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
    """What the authors' evaluator gives one job when nothing more is allocated while it is placed."""
    nodes = [*ps_nodes, *worker_nodes]
    network = bandwidth * float(sum(hops_to(topology, ps_nodes)[w] for w in worker_nodes))
    load = float(((2 + allocated[nodes]) / total[nodes]).sum())
    return network + (spread * load + len(set(nodes))) / len(nodes)
