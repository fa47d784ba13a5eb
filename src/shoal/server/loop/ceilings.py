"""Limits of users, groups and arrays on what jobs hold at this moment.

The scheduler's shares keep every limit. But a job that shrinks holds its GPUs until its workers have ended. A job that
the same decision lets grow waits until then, even if other GPUs are free.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from shoal.core.cluster import Cluster
from shoal.core.limits import Limits
from shoal.executors.base import NodeInfo
from shoal.server.loop.live_job import LiveJob


class Ceilings:
    def __init__(
        self, jobs: Mapping[int, LiveJob], nodes: Sequence[NodeInfo], cluster: Callable[[], Cluster]
    ) -> None:
        """`cluster` gives the users and groups with their limits."""
        self._jobs, self._nodes, self._cluster = jobs, nodes, cluster

    def allow(self, job: LiveJob, more: Mapping[int, int]) -> bool:
        """Whether the job may take so many more GPUs, by node index, in view of what is held now."""
        return all(self._fits(limits, holders, job, more) for limits, holders in self._limits(job))

    def _limits(self, job: LiveJob) -> Iterator[tuple[Limits, list[LiveJob]]]:
        """Each limit that the job is under, with the jobs that hold GPUs under it."""
        cluster = self._cluster()
        throttle = job.spec.get("throttle")
        if throttle is not None:
            yield Limits(max_running_jobs=throttle[1]), self._holding(lambda j: j.array == job.array)
        user = next((u for u in cluster.users if u.name == job.user), None)
        if user is None:
            return
        if user.limits:
            yield user.limits, self._holding(lambda j: j.user == job.user)
        group = next((g for g in cluster.groups if g.name == user.group), None)
        if group is not None and group.limits:
            members = {u.name for u in cluster.users if u.group == group.name}
            yield group.limits, self._holding(lambda j: j.user in members)

    def _holding(self, counts: Callable[[LiveJob], bool]) -> list[LiveJob]:
        return [j for j in self._jobs.values() if j.workers and counts(j) and j.gpus]

    def _fits(self, limits: Limits, holders: list[LiveJob], job: LiveJob, more: Mapping[int, int]) -> bool:
        most_jobs, most_gpus = limits.max_running_jobs, limits.max_gpus
        if most_jobs is not None and job not in holders and len(holders) >= most_jobs:
            return False
        if most_gpus is not None and sum(j.gpus for j in holders) + sum(more.values()) > most_gpus:
            return False
        for gpu_type, most in limits.max_gpus_of_type:
            new = sum(n for node, n in more.items() if self._nodes[node].gpu_type == gpu_type)
            if new and self._held_of_type(holders, gpu_type) + new > most:
                return False
        return True

    def _held_of_type(self, holders: list[LiveJob], gpu_type: str) -> int:
        return sum(
            w.gpus
            for j in holders
            for w in j.workers.values()
            if w.device[0] >= 0 and self._nodes[w.device[0]].gpu_type == gpu_type
        )
