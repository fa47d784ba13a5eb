"""Liquid's batch mode as a placement of shares: jobs that start together are placed together (TPDS'21).

Best fit places all jobs that start or grow, as `liquid_placer` does. If two or more jobs start, the genetic
algorithm then searches for a better plan for them, starting from the best-fit plan. The result is therefore
never worse than best fit, and a single job gets its best fit. Running workers stay where they are.

The random numbers depend on the seed and on the jobs of the batch only, so the same state and events give the
same result, also after a restart. A decision evaluates at most `max_plans` plans, over batches of at most
MOST_CONTAINERS workers and about MOST_NODES nodes. This takes tens of milliseconds on a cluster of any size.
Jobs beyond these limits keep their best fit.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from shoal.placement import pack
from shoal.placement.grouping_ga import Batch, Search, evolve
from shoal.placement.keep_and_pack import Request
from shoal.placement.liquid_placer import LiquidPlacer
from shoal.placement.liquid_score import Containers
from shoal.placement.topology import Topology

IntArray = NDArray[np.int32]

MAX_PLANS = 2000
MOST_CONTAINERS = 100
MOST_NODES = 50


class LiquidBatchPlacer(LiquidPlacer):
    """A `Placer`."""

    def __init__(self, *, search: Search | None = None, seed: int = 0, all_or_nothing: bool = False) -> None:
        self.search = search or Search(max_plans=MAX_PLANS)
        super().__init__(lam=self.search.lam, all_or_nothing=all_or_nothing)
        self.seed = seed

    def _place_growing(self, growing: list[Request]) -> None:
        starting = [r for r in growing if not r.held]
        super()._place_growing(growing)
        plans_left = self.search.max_plans
        for batch in _batches([r for r in starting if r.held and r.missing == 0]):
            plans_left -= self._place_together(batch, replace(self.search, max_plans=plans_left))

    def _place_together(self, requests: list[Request], search: Search) -> int:
        """Place jobs together again that best fit has placed. Returns the number of plans evaluated."""
        assert self._cluster is not None
        best_fit = np.array(
            [n for r in requests for n, gpus in r.held.items() for _ in range(gpus)], np.int32
        )
        size = search.population_for(len(best_fit))
        if search.max_plans < 2 * size:
            return 0
        for request in requests:
            self._release(request.held)
        room = pack.available(self._free, self._types, requests[0].gpu_type)
        nodes = _candidates(room, best_fit, [r.want for r in requests])
        total = self._cluster.gpus_of_node[nodes].astype(np.int32)
        batch = Batch.on(
            Topology.of(self._cluster).among(nodes),
            [Containers(0, r.want) for r in requests],
            total,
            (total - room[nodes]).astype(np.int32),
        )
        start = np.searchsorted(nodes, best_fit).astype(np.int32)
        rng = np.random.default_rng([self.seed, *(r.job_id for r in requests)])
        node_of, _, generations = evolve(batch, [start], rng, search)
        for request, spot in zip(requests, batch.spots(node_of)):
            for node in spot.worker_nodes:
                self._give(request.held, int(nodes[node]), 1)
        return size * (1 + generations)


def _batches(requests: Iterable[Request]) -> list[list[Request]]:
    """Batches of at most MOST_CONTAINERS workers of one GPU type, in order of the requests; two jobs at least."""
    batches: list[list[Request]] = []
    open_batch: dict[int, list[Request]] = {}
    for request in requests:
        batch = open_batch.get(request.gpu_type)
        if batch is None or sum(r.want for r in batch) + request.want > MOST_CONTAINERS:
            batch = open_batch[request.gpu_type] = []
            batches.append(batch)
        batch.append(request)
    return [batch for batch in batches if len(batch) > 1]


def _candidates(room: IntArray, best_fit: IntArray, wants: list[int]) -> IntArray:
    """The nodes to search, in increasing order.

    These are the nodes of the best-fit plan, the nodes that hold a job most tightly, and the fullest other
    nodes up to MOST_NODES.
    """
    fullest = np.argsort(room, kind="stable")
    fullest = fullest[room[fullest] > 0]
    chosen = dict.fromkeys(best_fit.tolist())
    for want in set(wants):
        holding = fullest[np.searchsorted(room[fullest], want) :]
        chosen |= dict.fromkeys(holding[: wants.count(want)].tolist())
    others = [n for n in fullest[: MOST_NODES + len(chosen)].tolist() if n not in chosen]
    return np.array(sorted([*chosen, *others[: max(MOST_NODES - len(chosen), 0)]]), np.int32)
