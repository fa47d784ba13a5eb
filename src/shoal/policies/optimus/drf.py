"""Dominant resource fairness over parameter-server jobs: the fairness baseline of the Optimus paper.

Jobs start with nothing. The job with the smallest dominant share gets one more bundle (one server and one worker);
on a tie, the job that arrived first. The dominant share of a job is the largest fraction that it has of any resource
of the cluster. The allocation ends at the first bundle that does not fit, as in the evaluation of Optimus. With
`skip_misfits`, a job whose bundle does not fit gets no further one and the others continue.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush

import numpy as np

from shoal.core.arrays import FloatArray, IntArray
from shoal.core.errors import ShoalError

#: The most bundles of one job, as in the published simulator.
MAX_BUNDLES = 16


def allocate(
    bundle_needs: FloatArray,
    capacity: FloatArray,
    max_bundles: IntArray | int = MAX_BUNDLES,
    *,
    skip_misfits: bool = False,
) -> IntArray:
    """Bundles of each job, in order of arrival. bundle_needs: [job, resource]; capacity: [resource]."""
    needs = np.asarray(bundle_needs, np.float64)
    free = np.asarray(capacity, np.float64).copy()
    if needs.ndim != 2 or needs.shape[1:] != free.shape:
        raise ShoalError(f"needs must be [job, resource] for {len(free)} resources, not {needs.shape}")
    if not ((needs >= 0).all() and (needs.max(axis=1, initial=0) > 0).all()):
        raise ShoalError("a bundle must need something, and nothing below 0")
    most = np.broadcast_to(np.asarray(max_bundles), (len(needs),))
    share_of_one = (needs / np.asarray(capacity)).max(axis=1)
    bundles = np.zeros(len(needs), np.int32)
    queue = [(0.0, job) for job in range(len(needs)) if most[job] > 0]
    heapify(queue)
    while queue:
        _, job = heappop(queue)
        if (needs[job] > free + 1e-9).any():
            if skip_misfits:
                continue
            break
        free -= needs[job]
        bundles[job] += 1
        if bundles[job] < most[job]:
            heappush(queue, (float(bundles[job] * share_of_one[job]), job))
    return bundles
