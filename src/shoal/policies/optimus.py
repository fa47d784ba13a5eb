"""Optimus: the GPU goes where it shortens a job most."""

from __future__ import annotations

import heapq

import numpy as np
from numba import njit

from shoal.core.view import View
from shoal.policies.afs_l import marginal_evidence
from shoal.policies.base import CountPolicy, FloatArray, IntArray
from shoal.policies.types import reference_curves


@njit(cache=True)
def optimus_shares(
    remaining: FloatArray,
    speeds: FloatArray,
    at: IntArray,
    min_gpus: IntArray,
    max_gpus: IntArray,
    gpus: int,
) -> IntArray:
    """One GPU at a time to argmax L_j(n) - L_j(n+1), the first of equals; a heap holds the gains.

    L(0) is infinite, so every job gets its minimum first, in order of submission.
    """
    n = len(remaining)
    share = np.zeros(n, np.int32)
    heap = [(0.0, 0)]
    heap.pop()
    for j in range(n):
        if min_gpus[j] <= gpus:
            share[j] = min_gpus[j]
            gpus -= min_gpus[j]
            if share[j] < max_gpus[j]:
                a = at[j] + share[j]
                heap.append((remaining[j] / speeds[a + 1] - remaining[j] / speeds[a], j))
    heapq.heapify(heap)
    while gpus > 0 and len(heap) > 0:
        loss, j = heap[0]
        if loss >= 0:
            break
        share[j] += 1
        gpus -= 1
        if share[j] < max_gpus[j]:
            a = at[j] + share[j]
            heapq.heapreplace(heap, (remaining[j] / speeds[a + 1] - remaining[j] / speeds[a], j))
        else:
            heapq.heappop(heap)
    return share


class Optimus(CountPolicy):
    """Marginal gain (Peng et al., EuroSys'18), in its form for GPUs only.

    Every job starts with its minimum, in order of arrival; then each GPU goes to the job with the largest
    L_j(n) - L_j(n+1), the remaining time it saves, until none saves any.
    """

    name = "optimus"
    summary = "each GPU where it saves most remaining time; lengths known (EuroSys'18)"
    needs_lengths = True

    def shares(self, view: View, gpus: int, now_s: float) -> IntArray:
        return optimus_shares(
            view.remaining_now(now_s),
            view.speeds,
            reference_curves(view),
            view.min_gpus,
            view.max_gpus,
            gpus,
        )

    def evidence(self, view: View, row: int, now_s: float) -> dict[str, float | int | str]:
        return marginal_evidence(view, row, view.remaining_now(now_s))
