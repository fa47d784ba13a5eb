"""How fragmented the free GPUs are.

Fragmentation is the fraction of the free GPUs that jobs with `size` GPUs on one node cannot use:

    fragmentation(size) = 1 - sum_n floor(free_n / size) size / sum_n free_n

It is 0 if such jobs can use every free GPU and 1 if they can use none.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from shoal.core.plan import Placement
from shoal.placement.validate import whole

IntArray = NDArray[np.int32]


def free_gpus(gpus_of_node: IntArray, placements: Iterable[Placement]) -> IntArray:
    """Free GPUs of each node."""
    free = gpus_of_node.astype(np.int32)
    for placement in placements:
        for node, gpus in placement:
            free[node] -= gpus
    return free


def fragmentation(free: IntArray, size: int) -> float:
    """The fraction of the free GPUs that jobs of `size` GPUs within a node cannot use; 0 if none is free."""
    whole("the size of a job", size, 1)
    total = int(free.sum())
    return 1.0 - float((free // size).sum() * size) / total if total else 0.0


def fewest_nodes(available: IntArray, need: int) -> int:
    """The smallest number of nodes that hold `need` GPUs; 0 if all nodes together do not."""
    within = np.cumsum(np.sort(available)[::-1])
    return int(np.searchsorted(within, need) + 1) if len(within) and within[-1] >= need else 0
