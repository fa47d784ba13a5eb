"""Fragmentation of the free GPUs over time, and the spread of jobs over nodes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from shoal.core.cluster import Cluster
from shoal.core.plan import Placement, Reconfigure


class FragmentationMeter:
    """Follows the placements of a run. The figures are averages over time, weighted by free and by used GPUs.

    fragmentation by size: the fraction of the free GPUs that jobs of this size within a node could not use.
    spread: the fraction of the GPUs in use whose job spans more nodes than it would on an empty cluster.
    """

    def __init__(self, cluster: Cluster) -> None:
        largest = int(cluster.gpus_of_node.max())
        self.sizes = [1 << i for i in range(1, largest.bit_length())] or [1]
        self._free = cluster.gpus_of_node.astype(np.int64)
        self._node_size = largest
        self._placed: dict[int, Placement] = {}
        self._spread_gpus = 0
        self._used_gpus = 0
        self._since_s: float | None = None
        self._free_s = 0.0
        self._stranded_s = np.zeros(len(self.sizes))
        self._used_s = 0.0
        self._spread_s = 0.0
        self.moves = 0

    def observe(self, command: Reconfigure) -> None:
        """The placement of a job has changed."""
        self.forget(command.job)
        if command.verb == "migrate":
            self.moves += 1
        if command.placement:
            self._placed[command.job] = command.placement
            self._add(command.placement, 1)

    def forget(self, job_id: int) -> None:
        """A job has released its GPUs."""
        before = self._placed.pop(job_id, None)
        if before:
            self._add(before, -1)

    def _add(self, placement: Placement, sign: int) -> None:
        gpus = 0
        for node, here in placement:
            self._free[node] -= sign * here
            gpus += here
        self._used_gpus += sign * gpus
        if len(placement) > -(-gpus // self._node_size):
            self._spread_gpus += sign * gpus

    def settle(self, now_s: float) -> None:
        """Add the time since the last call; call it before each change."""
        lasted_s = 0.0 if self._since_s is None else now_s - self._since_s
        self._since_s = now_s
        if lasted_s <= 0:
            return
        free = int(self._free.sum())
        self._free_s += lasted_s * free
        self._used_s += lasted_s * self._used_gpus
        self._spread_s += lasted_s * self._spread_gpus
        for i, size in enumerate(self.sizes):
            self._stranded_s[i] += lasted_s * int((self._free % size).sum())

    def figures(self) -> Mapping[str, Any]:
        by_size = {
            str(size): float(stranded / self._free_s) if self._free_s else 0.0
            for size, stranded in zip(self.sizes, self._stranded_s)
        }
        return {
            "fragmentation": by_size,
            "spread": self._spread_s / self._used_s if self._used_s else 0.0,
            "moves": self.moves,
        }
