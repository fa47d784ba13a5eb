"""Tetris over parameter-server jobs (SIGCOMM'14): the packing baseline of the Optimus paper.

Node by node: of the bundles (one server and one worker) that fit, place the one with the best score. Then
compute all scores again, until nothing fits.

    score     = A_j - e S_j
    alignment A_j = sum over resources of free * demand        (aligned demands leave few fragments)
    length    S_j = sum of demand * fraction of the job that is left   (short jobs first)
    e         = mean A / mean S

Free and demand are fractions of the node. The published simulator of DL2 adds e S_j instead, so it prefers
long jobs; `prefer_long` selects this.
"""

from __future__ import annotations

import numpy as np

from shoal.core.arrays import FloatArray, IntArray
from shoal.core.errors import ShoalError

MAX_BUNDLES = 16


def place(
    capacity: FloatArray,
    bundle_needs: FloatArray,
    left: FloatArray,
    max_bundles: IntArray | int = MAX_BUNDLES,
    *,
    prefer_long: bool = False,
) -> IntArray:
    """[job, node]: bundles of each job on each node. capacity: [node, resource], all of it free.

    bundle_needs: [job, resource]; left: [job], the fraction (0..1) of each job that is left.
    """
    free = np.asarray(capacity, np.float64).copy()
    needs, left = np.asarray(bundle_needs, np.float64), np.asarray(left, np.float64)
    if needs.ndim != 2 or needs.shape[1] != free.shape[1] or len(left) != len(needs):
        raise ShoalError(f"needs must be [job, resource] for {free.shape[1]} resources, not {needs.shape}")
    if not (needs.max(axis=1, initial=0) > 0).all():
        raise ShoalError("a bundle must need something")
    most = np.broadcast_to(np.asarray(max_bundles), (len(needs),))
    placed = np.zeros((len(needs), len(free)), np.int32)
    for node in range(len(free)):
        whole = np.where(free[node] > 0, free[node], 1.0)
        demand = needs / whole
        size = demand.sum(axis=1) * left
        while True:
            able = (needs <= free[node] + 1e-9).all(axis=1) & (placed.sum(axis=1) < most)
            if not able.any():
                break
            alignment = demand @ (free[node] / whole)
            mean_size = size[able].mean()
            weight = alignment[able].mean() / mean_size if mean_size > 0 else 0.0
            score = alignment + (weight if prefer_long else -weight) * size
            job = int(np.argmax(np.where(able, score, -np.inf)))
            placed[job, node] += 1
            free[node] -= needs[job]
    return placed
