"""Limits of users, groups and arrays on what jobs hold at this moment.

The scheduler's shares keep every limit. But a job that shrinks holds its GPUs until its workers have ended. A job that
the same decision lets grow waits until then, even if other GPUs are free.

A live job that moves, or replaces a slow worker, holds the old and the new GPU until the old worker has ended. A new
worker that takes the place of an old one is not counted until then. So a job at its limit can move, and each place of
a job has at most two workers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from shoal.core.cluster import Cluster
from shoal.core.limits import Limits
from shoal.executors.base import NodeInfo
from shoal.server.loop.live_job import LEAVING, LiveJob, LiveWorker


class Ceilings:
    def __init__(
        self, jobs: Mapping[int, LiveJob], nodes: Sequence[NodeInfo], cluster: Callable[[], Cluster]
    ) -> None:
        """`cluster` gives the users and groups with their limits."""
        self._jobs, self._nodes, self._cluster = jobs, nodes, cluster

    def allow(self, job: LiveJob, more: Mapping[int, int], leavers: Iterable[LiveWorker] = ()) -> bool:
        """Whether the job may take so many more GPUs, by node index, in view of what is held now.

        `leavers`: its workers that leave when the new ones have joined. New workers take their places.
        """
        places = [w for w in leavers if may_be_replaced(job, w)]
        return all(self._fits(limits, holders, job, more, places) for limits, holders in self._limits(job))

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

    def _fits(
        self,
        limits: Limits,
        holders: list[LiveJob],
        job: LiveJob,
        more: Mapping[int, int],
        places: list[LiveWorker],
    ) -> bool:
        most_jobs, most_gpus = limits.max_running_jobs, limits.max_gpus
        if most_jobs is not None and job not in holders and len(holders) >= most_jobs:
            return False
        extra = sum(more.values()) - len(places)
        held = sum(w.gpus for j in holders for w in counted_workers(j))
        if most_gpus is not None and extra > 0 and held + extra > most_gpus:
            return False
        new: Counter[str] = Counter()
        for node, gpus in more.items():
            new[self._nodes[node].gpu_type] += gpus
        new.subtract(self._type(w) for w in places)
        return all(
            new[gpu_type] <= 0 or self._held_of_type(holders, gpu_type) + new[gpu_type] <= most
            for gpu_type, most in limits.max_gpus_of_type
        )

    def _held_of_type(self, holders: list[LiveJob], gpu_type: str) -> int:
        """A new worker of another type than the one whose place it takes counts at once."""
        return sum(
            w.gpus
            for j in holders
            for w in j.workers.values()
            if self._type(w) == gpu_type
            and not (_is_second(j, w) and self._type(j.workers[w.replaces or ""]) == gpu_type)
        )

    def _type(self, worker: LiveWorker) -> str:
        """The type of its GPUs; empty if they are no longer there."""
        node = worker.device[0]
        return self._nodes[node].gpu_type if node >= 0 else ""

    def take_places(self, job: LiveJob, new: Iterable[LiveWorker], leavers: Iterable[LiveWorker]) -> None:
        """Let new workers take the places of workers that leave: of one on the same type of GPU, if there is one."""
        free = [w for w in leavers if may_be_replaced(job, w)]
        rest = []
        for worker in new:
            same = next((w for w in free if self._type(w) == self._type(worker)), None)
            if same is None:
                rest.append(worker)
                continue
            free.remove(same)
            worker.replaces = same.id
        for worker, old in zip(rest, free):
            worker.replaces = old.id


def may_be_replaced(job: LiveJob, worker: LiveWorker) -> bool:
    """Whether a new worker can take its place: it is not leaving already, and no third would share the place."""
    if worker.state == LEAVING or not worker.holds_gpu or _is_second(job, worker):
        return False
    return all(w.replaces != worker.id for w in job.workers.values())


def counted_workers(job: LiveJob) -> list[LiveWorker]:
    """The workers that count for a limit: all but the new ones whose place an old one still has."""
    return [w for w in job.workers.values() if not _is_second(job, w)]


def _is_second(job: LiveJob, worker: LiveWorker) -> bool:
    """Whether the worker whose place it takes still holds its GPU."""
    old = job.workers.get(worker.replaces) if worker.replaces is not None else None
    return old is not None and old.holds_gpu
