"""Liquid's best fit as a placement of shares (TPDS'21).

A job that starts or grows places its new workers one after another, each where the score of the whole job is
lowest. Its other workers stay. A share is placed as an all-reduce job, by the cost of its ring: parameter
servers need no GPU and run on the CPUs of the job's nodes.

The first worker of a job has the same score on all nodes that are used alike. The paper takes any; here it goes
to the rack that has just enough room for the others, so that they can stay in it.
"""

from __future__ import annotations

import numpy as np

from shoal.placement.best_fit import BestFit, FloatArray, IntArray, best_fit
from shoal.placement.keep_and_pack import KeepAndPack, Request
from shoal.placement.liquid_score import LAMBDA, ContainerPlacement, Containers


class LiquidPlacer(KeepAndPack):
    """A `Placer`."""

    def __init__(
        self,
        *,
        variant: BestFit = BestFit.REMOVE_FULL,
        lam: float = LAMBDA,
        all_or_nothing: bool = False,
    ) -> None:
        super().__init__(all_or_nothing=all_or_nothing)
        self.grows_in_place = False
        self.variant, self.lam = variant, lam

    def _place_rest(self, request: Request) -> None:
        assert self._cluster is not None
        kept = [node for node, gpus in request.held.items() for _ in range(gpus)]
        own = np.zeros_like(self._free)
        for node in kept:
            own[node] += 1
        # Nodes of other types and the GPUs of lost nodes count as used.
        of_type = (self._types == request.gpu_type) | (request.gpu_type < 0)
        total = self._cluster.gpus_of_node
        used = np.where(of_type, total - np.maximum(self._free, 0) - own, total)
        most = len(kept) + min(request.missing, int(self._free[of_type & (self._free > 0)].sum()))
        if most == len(kept):
            return
        job = Containers(0, most)
        preference = room_in_rack(self._cluster.rack_of_node, total - used, most - len(kept))
        spot = best_fit(
            self._cluster, job, used, variant=self.variant, lam=self.lam, kept=kept, preference=preference
        )
        if isinstance(spot, ContainerPlacement):
            for node in spot.worker_nodes[len(kept) :]:
                self._give(request.held, node, 1)


def room_in_rack(rack_of_node: IntArray, free: IntArray, gpus: int) -> FloatArray:
    """For each node, lower if its rack suits a job of so many GPUs better: racks that have room for all of it, the
    fullest first, then the others, the emptiest first."""
    room = np.bincount(rack_of_node, weights=free)[rack_of_node]
    return np.where(room >= gpus, room, 2 * free.sum() - room)
