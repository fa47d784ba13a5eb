"""Liquid's immediate mode: best fit (TPDS'21, Algorithm 1).

Each container of the job goes to the node with room that gives the job placed so far the lowest score. Ties go to
the node that the caller prefers, or to the first. There are three variants:

- REMOVE_FULL: a node is no longer a candidate once it is full. This is the default.
- REMOVE_ALWAYS: a node is no longer a candidate once it has a container (line 18 of the paper, taken
  literally). This places one container per node, which contradicts the aim of keeping a job together.
- AUTHORS_CODE: the score of the authors' code, which never removes nodes, and prefers empty nodes for a
  server so that its workers can join it.

One decision takes O(containers x nodes) in vector operations.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from shoal.core.cluster import Cluster
from shoal.core.errors import ShoalError
from shoal.placement.liquid_score import LAMBDA, ContainerPlacement, Containers, hops_to
from shoal.placement.placer import Unplaced
from shoal.placement.topology import Topology
from shoal.placement.validate import amount

IntArray = NDArray[np.int32]
FloatArray = NDArray[np.float64]


class BestFit(enum.StrEnum):
    """Variant of the algorithm."""

    REMOVE_FULL = "remove-full"
    REMOVE_ALWAYS = "remove-always"
    AUTHORS_CODE = "authors-code"


def best_fit(
    cluster: Cluster,
    job: Containers,
    used: IntArray,
    *,
    variant: BestFit = BestFit.REMOVE_FULL,
    lam: float = LAMBDA,
    topology: Topology | None = None,
    kept: Sequence[int] = (),
    preference: FloatArray | None = None,
) -> ContainerPlacement | Unplaced:
    """Nodes for the containers of one job. `used` is the number of GPUs in use on each node.

    `kept` are the nodes of workers that stay (not counted in `used`), for a job without servers. `preference`: of nodes
    with equal scores, the one with the lowest value is taken, and not the first.
    """
    total = cluster.gpus_of_node
    amount("lambda", lam, 0.0, 1.0)
    check_used(total, used)
    if int((total - used).sum()) < job.total:
        return Unplaced(f"it needs {job.total} GPUs and {int((total - used).sum())} are free")
    topology = topology or Topology.of(cluster)
    score = _code_score if variant is BestFit.AUTHORS_CODE else _paper_score
    at = _Tentative(topology, total, used, job, lam)
    open_nodes = total > used
    running = 0.0
    for node in kept:
        at.put(node, is_ps=False)
        open_nodes[node] = at.mine[node] + used[node] < total[node] and variant is not BestFit.REMOVE_ALWAYS
    for is_ps in job.roles()[len(kept) :]:
        if not open_nodes.any():
            return Unplaced(
                f"one container per node needs {job.total} nodes with a free GPU, "
                f"and there are {int((total > used).sum())}"
            )
        scores = np.where(open_nodes, score(at, is_ps), np.inf)
        node = _lowest(scores, preference)
        running = float(scores[node])
        at.put(node, is_ps)
        open_nodes[node] = at.mine[node] + used[node] < total[node] and variant is not BestFit.REMOVE_ALWAYS
    return ContainerPlacement(tuple(at.ps), tuple(at.workers), running)


def _lowest(scores: FloatArray, preference: FloatArray | None) -> int:
    rounded = np.round(scores, 9)  # ignore rounding errors: they are no order
    if preference is None:
        return int(np.argmin(rounded))
    equal = np.flatnonzero(rounded == rounded.min())
    return int(equal[np.argmin(preference[equal])])


def check_used(total: IntArray, used: IntArray) -> None:
    """Check that `used` can be the GPUs in use on nodes with `total` GPUs."""
    if np.shape(used) != total.shape:
        raise ShoalError(f"GPUs in use must be given for {len(total)} nodes, not {np.shape(used)}")
    if not ((used >= 0) & (used <= total)).all() or not np.issubdtype(used.dtype, np.integer):
        raise ShoalError("GPUs in use must be whole numbers from 0 to those of the node")


class _Tentative:
    """A partly placed job, with its score so far."""

    def __init__(
        self, topology: Topology, total: IntArray, used: IntArray, job: Containers, lam: float
    ) -> None:
        self.topology, self.total, self.used, self.job, self.lam = topology, total, used, job, lam
        self.mine = np.zeros(len(total), np.int32)
        self.ps: list[int] = []
        self.workers: list[int] = []
        self.network = 0.0  #: of the authors' code
        self.load = 0.0

    @property
    def count(self) -> int:
        return len(self.ps) + len(self.workers)

    def put(self, node: int, is_ps: bool) -> None:
        self.network += float(self.code_network(is_ps)[node])
        self.load += float(self.code_load()[node])
        self.mine[node] += 1
        (self.ps if is_ps else self.workers).append(node)

    def code_network(self, is_ps: bool) -> FloatArray:
        return self.job.bandwidth * hops_to(self.topology, self.workers if is_ps else self.ps)

    def code_load(self) -> FloatArray:
        return np.asarray((2 + self.used + self.mine) / self.total)

    def cost_of(self, is_ps: bool) -> FloatArray:
        """Cost_k for each node, if the next container went there."""
        t = self.topology
        if self.job.ps == 0:
            return self._ring_cost_of()
        now = t.server_cost(self.ps, self.workers)
        return now + t.cost_to(np.array(self.workers if is_ps else self.ps, np.int32))

    def _ring_cost_of(self) -> FloatArray:
        """The ring cost for each node, if the next worker went there.

        Nodes that the job does not use yet have equal cost within a rack that it uses, and within the other
        racks of a domain.
        """
        t = self.topology
        racks, domains = t.rack_of_node, t.domain_of_node
        near = np.isin(racks, racks[self.workers])
        alike = np.where(near, racks, len(t.rack_cost) + domains)
        cost = np.zeros(len(t.rack_cost) + len(t.domain_cost))
        fresh, first = np.unique(alike[self.mine == 0], return_index=True)
        for kind, at in zip(fresh.tolist(), np.flatnonzero(self.mine == 0)[first].tolist()):
            cost[kind] = t.ring_cost([*self.workers, at])
        here = t.ring_cost(self.workers) if self.workers else 0.0
        return np.where(self.mine > 0, here, cost[alike])


def _paper_score(at: _Tentative, is_ps: bool) -> FloatArray:
    """λ Cost + (1 - λ) sum of Fitness for each node, if the next container went there."""
    on = at.mine > 0
    fitness = -float(((at.mine[on] + at.used[on]) / at.total[on]).sum())
    more = -np.where(on, 1, 1 + at.used) / at.total
    return np.asarray(at.lam * at.cost_of(is_ps) + (1 - at.lam) * (fitness + more))


def _code_score(at: _Tentative, is_ps: bool) -> FloatArray:
    """The authors' evaluator for each node, if the next container went there; a server prefers empty nodes."""
    spread = 1.0 if is_ps else -1.0
    load = at.load + at.code_load()
    distinct = np.count_nonzero(at.mine) + (at.mine == 0)
    return np.asarray(at.network + at.code_network(is_ps) + (spread * load + distinct) / (at.count + 1))
