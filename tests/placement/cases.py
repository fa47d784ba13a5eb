"""Clusters, views and decisions in few words, for the tests of placing."""

from __future__ import annotations

import numpy as np

from shoal.core.cluster import Cluster
from shoal.core.decision import Decision
from shoal.core.job import GpuRange, Job
from shoal.core.plan import Placement
from shoal.core.profile import Profile
from shoal.core.supply import Supply
from shoal.core.view import View


def size(placement: Placement) -> int:
    return sum(gpus for _, gpus in placement)


class Bench:
    """A cluster with jobs on it, and a placer asked again and again, as the scheduler does."""

    def __init__(self, cluster: Cluster, placer) -> None:
        self.cluster, self.placer = cluster, placer
        self.view = View(cluster.gpu_types, cluster.total_gpus)
        self.supply = Supply.of(cluster)
        self.current: dict[int, Placement] = {}
        self.profile = Profile.of("m", {g: 1.0 / g for g in range(1, cluster.total_gpus + 1)})

    def add(self, job_id: int, min_gpus: int = 1) -> None:
        job = Job(f"j{job_id}", 0.0, GpuRange(min_gpus, self.cluster.total_gpus), min_gpus)
        self.view.add(job_id, job, self.profile, 0, 0.0)

    def remove(self, job_id: int) -> None:
        self.view.remove(job_id)
        self.current.pop(job_id, None)

    def lose(self, *nodes: int) -> None:
        self.supply = Supply.of(self.cluster).without(set(nodes))

    def decision(self, shares: dict[int, int], types: dict[int, int] | None = None, given=None) -> Decision:
        """Shares by job; who is not named keeps what it has."""
        gpus = self.view.gpus.copy()
        gpu_type = None if types is None else self.view.gpu_type.copy()
        for job_id, share in shares.items():
            gpus[self.view.row(job_id)] = share
        for job_id, kind in (types or {}).items():
            gpu_type[self.view.row(job_id)] = kind
        by_row = None if given is None else {self.view.row(j): p for j, p in given.items()}
        return Decision(gpus, gpu_type, placements=by_row)

    def place(self, shares: dict[int, int], **kw):
        decision = self.decision(shares, **kw)
        placed = self.placer.place(self.view, decision, self.supply, self.current)
        for job_id, placement in placed.placements.items():
            row = self.view.row(job_id)
            self.view.gpus[row] = size(placement)
            if placement:
                self.current[job_id] = placement
                self.view.gpu_type[row] = self.cluster.type_of_node[placement[0][0]]
            else:
                self.current.pop(job_id, None)
        return placed

    def used(self) -> np.ndarray:
        used = np.zeros(len(self.cluster.nodes), int)
        for placement in self.current.values():
            for node, gpus in placement:
                used[node] += gpus
        return used
