"""The GPUs that can be shared out now."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shoal.core.arrays import IntArray
from shoal.core.cluster import Cluster


@dataclass(frozen=True, slots=True)
class Supply:
    """The GPUs there are to share out now: the cluster less what is lost or taken out of use."""

    cluster: Cluster
    #: GPUs in use-able state, by type and by node.
    gpus_of_type: IntArray
    gpus_of_node: IntArray
    total_gpus: int

    @classmethod
    def of(cls, cluster: Cluster) -> Supply:
        return cls(cluster, cluster.gpus_of_type, cluster.gpus_of_node, cluster.total_gpus)

    def without(self, lost_nodes: set[int]) -> Supply:
        """What is left when these nodes are gone."""
        up = self.cluster.gpus_of_node.copy()
        up[list(lost_nodes)] = 0
        by_type = np.bincount(self.cluster.type_of_node, weights=up, minlength=len(self.gpus_of_type))
        return Supply(self.cluster, by_type.astype(np.int32), up, int(up.sum()))
