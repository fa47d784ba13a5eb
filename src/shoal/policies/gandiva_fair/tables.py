"""Arrays that belong together. Kernels take these instead of long lists of bare arrays."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shoal.core.arrays import BoolArray, FloatArray, IntArray
from shoal.core.supply import Supply

#: Row numbers of the view.
Rows = NDArray[np.int64]

#: Values of `Jobs.home` other than a node: not bound, or entry `SPANS - home` of `Spans`.
NOWHERE = -1
SPANS = -3


class Nodes(NamedTuple):
    """The nodes. A pool of GPUs counts as one node per GPU type."""

    gpus: IntArray
    gpu_type: IntArray

    @classmethod
    def of(cls, supply: Supply) -> Nodes:
        if supply.cluster.pooled:
            return cls(supply.gpus_of_type, np.arange(len(supply.gpus_of_type), dtype=np.int32))
        return cls(supply.gpus_of_node, supply.cluster.type_of_node)


class Spans(NamedTuple):
    """Gangs that span nodes: gang k is row rows[k] and takes gpus[j] of node[j], start[k] <= j < start[k + 1]."""

    rows: Rows
    start: IntArray
    node: IntArray
    gpus: IntArray


class Jobs(NamedTuple):
    """One entry per row of the view."""

    size: IntArray
    #: A node, NOWHERE, or SPANS - k for gang k of `Spans`.
    home: IntArray
    #: GPUs that the job is due on average: its tickets.
    due: FloatArray


class Claims(NamedTuple):
    """What each row asks for, and of which GPU type (-1: none)."""

    user: IntArray
    gpu_type: IntArray
    size: IntArray
    #: Relative weight among the jobs of one user.
    weight: FloatArray
    active: BoolArray


class TypeTargets(NamedTuple):
    """How many GPUs' worth of jobs each user should have, and has, on each GPU type."""

    user: IntArray
    size: IntArray
    #: [type, row]: speed of the gang, 0 where it cannot run.
    speed: FloatArray
    #: [user, type]
    target: FloatArray
    #: [user, type]; functions that bind jobs update it.
    bound: FloatArray
