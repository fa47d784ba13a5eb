"""The GPUs that can be allocated now."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shoal.core.arrays import IntArray
from shoal.core.cluster import Cluster


@dataclass(frozen=True, slots=True)
class Supply:
    """The GPUs that can be allocated now: those of the cluster without lost and drained nodes."""

    cluster: Cluster
    #: Usable GPUs, by type and by node.
    gpus_of_type: IntArray
    gpus_of_node: IntArray
    total_gpus: int

    @classmethod
    def of(cls, cluster: Cluster) -> Supply:
        return cls(cluster, cluster.gpus_of_type, cluster.gpus_of_node, cluster.total_gpus)

    def without(self, lost_nodes: set[int]) -> Supply:
        """The supply without these nodes."""
        up = self.cluster.gpus_of_node.copy()
        up[list(lost_nodes)] = 0
        by_type = np.bincount(self.cluster.type_of_node, weights=up, minlength=len(self.gpus_of_type))
        return Supply(self.cluster, by_type.astype(np.int32), up, int(up.sum()))
