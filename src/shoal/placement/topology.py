"""The communication cost between two containers, by their nodes (Liquid, TPDS'21).

    Cost(n1, n2) = 0                            on the same node
                   number of nodes in the rack    in the same rack
                   number of nodes in the domain  across racks of a domain
                   CROSS_DOMAIN * all nodes       across domains

The paper only says that placements across domains are to be avoided. The authors' code weighs rack, domain
and other domains as 1 : 4 : 40, hence the factor of ten over the most expensive link inside a domain.

The cost of a parameter-server job is the sum over all pairs of a server and a worker. The cost of an
all-reduce job is the sum over the links of one ring through its nodes, in which the nodes of a rack and of a
domain are neighbours. In a ring, every worker sends the same amount to one neighbour only, so links inside a
node are free, and this order is the cheapest.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from shoal.core.cluster import Cluster

IntArray = NDArray[np.int32]
FloatArray = NDArray[np.float64]

CROSS_DOMAIN = 10.0


@dataclass(frozen=True, eq=False)
class Topology:
    """Rack and domain of each node, and the cost of a link inside each rack and domain."""

    rack_of_node: IntArray
    domain_of_node: IntArray
    rack_cost: FloatArray  #: by rack
    domain_cost: FloatArray  #: by domain
    cross_cost: float

    @classmethod
    def of(cls, cluster: Cluster) -> Topology:
        racks, domains = cluster.rack_of_node, cluster.domain_of_node
        return cls(
            racks,
            domains,
            np.bincount(racks).astype(np.float64),
            np.bincount(domains).astype(np.float64),
            CROSS_DOMAIN * len(cluster.nodes),
        )

    def among(self, nodes: IntArray) -> Topology:
        """The topology of a subset of the nodes. Link costs stay those of the whole cluster."""
        return replace(self, rack_of_node=self.rack_of_node[nodes], domain_of_node=self.domain_of_node[nodes])

    def cost(self, a: int, b: int) -> float:
        """Cost(a, b) of two nodes."""
        if a == b:
            return 0.0
        if self.rack_of_node[a] == self.rack_of_node[b]:
            return float(self.rack_cost[self.rack_of_node[a]])
        if self.domain_of_node[a] == self.domain_of_node[b]:
            return float(self.domain_cost[self.domain_of_node[a]])
        return self.cross_cost

    def cost_to(self, others: IntArray) -> FloatArray:
        """For each node, the sum of the costs to `others` (nodes; a node may occur several times)."""
        nodes = len(self.rack_of_node)
        on_node = np.bincount(others, minlength=nodes)
        in_rack = np.bincount(self.rack_of_node[others], minlength=len(self.rack_cost))[self.rack_of_node]
        in_domain = np.bincount(self.domain_of_node[others], minlength=len(self.domain_cost))[
            self.domain_of_node
        ]
        return np.asarray(
            (in_rack - on_node) * self.rack_cost[self.rack_of_node]
            + (in_domain - in_rack) * self.domain_cost[self.domain_of_node]
            + (len(others) - in_domain) * self.cross_cost
        )

    def matrix(self) -> FloatArray:
        """Cost of each pair of nodes."""
        rack, domain = self.rack_of_node, self.domain_of_node
        cost = np.full((len(rack), len(rack)), self.cross_cost)
        same_domain = domain[:, None] == domain
        cost[same_domain] = np.broadcast_to(self.domain_cost[domain], cost.shape)[same_domain]
        same_rack = rack[:, None] == rack
        cost[same_rack] = np.broadcast_to(self.rack_cost[rack], cost.shape)[same_rack]
        np.fill_diagonal(cost, 0.0)
        return cost

    def server_cost(self, ps_nodes: Iterable[int], worker_nodes: Iterable[int]) -> float:
        """Cost_k of a parameter-server job: the sum over its pairs of a server and a worker."""
        ps = np.fromiter(ps_nodes, np.int32)
        return float(sum(self.cost_to(ps)[worker] for worker in worker_nodes)) if len(ps) else 0.0

    def ring_cost(self, worker_nodes: Iterable[int]) -> float:
        """Cost_k of an all-reduce job: the links of its cheapest ring."""
        ring = sorted(set(worker_nodes), key=lambda n: (self.domain_of_node[n], self.rack_of_node[n], n))
        if len(ring) == 1:
            return 0.0
        return sum(self.cost(a, b) for a, b in zip(ring, [*ring[1:], *ring[:1]]))
