"""A placer around another one: suspended processes continue only on the nodes where they are.

A pinned job that gets a share is placed on its own nodes, or it gets nothing until they have room.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

import numpy as np

from shoal.core.arrays import IntArray
from shoal.core.decision import Decision
from shoal.core.plan import Placement
from shoal.core.supply import Supply
from shoal.core.view import View
from shoal.placement.placer import Placed, Placer


class PinnedPlacer:
    """A `Placer`. `pins` gives the placement of each job whose processes are suspended, by id."""

    def __init__(self, inner: Placer, pins: Callable[[], Mapping[int, Placement]]) -> None:
        self.inner, self._pins = inner, pins

    def place(self, view: View, decision: Decision, supply: Supply, current: dict[int, Placement]) -> Placed:
        wanted = {
            job_id: placement
            for job_id, placement in sorted(self._pins().items())
            if job_id not in current and job_id in view and decision.gpus[view.row(job_id)] > 0
        }
        if not wanted:
            return self.inner.place(view, decision, supply, current)
        fit = _fitting(wanted, _free(view, decision, supply, current))
        # The placer within sees a cluster without the GPUs of these jobs, and a decision without the jobs.
        rows = {view.row(job_id) for job_id in wanted}
        gpus = decision.gpus.copy()
        gpus[list(rows)] = 0
        given = {row: p for row, p in (decision.placements or {}).items() if row not in rows}
        rest = replace(decision, gpus=gpus, placements=given or None)
        placed = self.inner.place(view, rest, _without(supply, fit.values()), current)
        cut = {job_id: 0 for job_id in wanted if job_id not in fit}
        return Placed(placed.placements | fit, placed.cut | cut)


def _free(view: View, decision: Decision, supply: Supply, current: Mapping[int, Placement]) -> IntArray:
    """GPUs by node that no job keeps."""
    free = supply.gpus_of_node.astype(np.int32)
    for job_id, placement in current.items():
        if job_id not in view or decision.gpus[view.row(job_id)] > 0:
            for node, gpus in placement:
                free[node] -= gpus
    return free


def _fitting(wanted: Mapping[int, Placement], free: IntArray) -> dict[int, Placement]:
    found: dict[int, Placement] = {}
    for job_id, placement in wanted.items():
        if all(free[node] >= gpus for node, gpus in placement):
            found[job_id] = placement
            for node, gpus in placement:
                free[node] -= gpus
    return found


def _without(supply: Supply, placements: Iterable[Placement]) -> Supply:
    left = supply.gpus_of_node.astype(np.int32)
    for placement in placements:
        for node, gpus in placement:
            left[node] -= gpus
    by_type = np.bincount(supply.cluster.type_of_node, weights=left, minlength=len(supply.gpus_of_type))
    return replace(
        supply, gpus_of_node=left, gpus_of_type=by_type.astype(np.int32), total_gpus=int(left.sum())
    )
