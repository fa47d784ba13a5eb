"""Optimus' rule as a placement of shares: the fewest nodes that hold a job in equal parts (EuroSys'18).

A job whose share changes is distributed again over the k nodes with the most free GPUs, for the smallest k
that holds it (`task_placement` implements the rule). Smaller jobs choose first. A job whose share does not
change keeps its placement, whereas Optimus places all jobs again in every interval. Parameter servers need
no GPU: they run on the CPUs of the job's nodes, in equal numbers.
"""

from __future__ import annotations

import numpy as np

from shoal.placement import pack
from shoal.placement.keep_and_pack import KeepAndPack, Request
from shoal.placement.task_placement import place


class OptimusPlacer(KeepAndPack):
    """A `Placer`."""

    def __init__(self, *, all_or_nothing: bool = False) -> None:
        super().__init__(all_or_nothing=all_or_nothing)
        self.grows_in_place = False

    def _turn(self, request: Request) -> tuple[int, int]:
        return request.want, request.row

    def _shrink(self, request: Request) -> None:
        self._place_rest(request)

    def _place_rest(self, request: Request) -> None:
        before = dict(request.held)
        self._release(request.held)
        free = pack.available(self._free, self._types, request.gpu_type).astype(np.float64)[:, None]
        one, nothing = np.ones((1, 1)), np.zeros((1, 1))
        dealt = place(free, np.array([1]), np.array([request.want]), nothing, one)
        chosen = {node: workers for node, _, workers in dealt.of(0) if workers}
        if sum(chosen.values()) <= sum(before.values()) <= request.want:
            chosen = before  # no gain: keep the placement
        for node, gpus in chosen.items():
            self._give(request.held, node, gpus)
