"""What counts against the limits of users and groups now, and what the policy in force ignores of what was set."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from shoal.core.limits import Limits
from shoal.core.words import counted
from shoal.server.api import models as m
from shoal.server.loop.ceilings import counted_workers
from shoal.server.loop.live_job import LiveJob
from shoal.server.loop.people import groups_of, limits_of
from shoal.server.services.loop_view import LoopView
from shoal.server.store.change import Row
from shoal.server.store.store import Store


class LimitsUse:
    def __init__(self, loop: LoopView, store: Store) -> None:
        self._loop, self._store = loop, store

    def of(self, users: Collection[str]) -> m.LimitsUse:
        """What the jobs of these users hold now, and got this week."""
        scheduler = self._loop.scheduler
        mine = [j for j in self._loop.jobs.values() if j.user in users]
        indexes = [i for i, user in enumerate(scheduler.cluster.users) if user.name in users]
        by_type: dict[str, int] = {}
        workers = [w for j in mine for w in counted_workers(j) if w.gpus]
        for worker in workers:
            if worker.device[0] >= 0:
                gpu_type = self._loop.table.infos[worker.device[0]].gpu_type
                by_type[gpu_type] = by_type.get(gpu_type, 0) + worker.gpus
        return m.LimitsUse(
            gpus=sum(w.gpus for w in workers),
            gpus_of_type=by_type,
            running_jobs=sum(j.gpus > 0 for j in mine),
            waiting_jobs=sum(_waits(j) for j in mine),
            gpu_hours_of_week=scheduler.gpu_seconds_of_week(indexes, self._loop.now_s()) / 3600.0,
        )

    def warnings(self, row: Row, users: Collection[str]) -> list[str]:
        """Of a user or a group: limits below the present use, and tickets that the policy ignores."""
        limits, use = limits_of(row), self.of(users)
        found = list(_above(limits, use, row["name"]))
        policy = self._loop.scheduler.policy
        if not policy.uses_tickets and row["tickets"] not in (None, 1.0):
            found.append(f"policy {self._loop.policy_name} ignores tickets; fair-afs and others use them")
        return found

    def ignored(self) -> list[str]:
        """What was set by somebody and has no effect under the policy in force."""
        policy, name = self._loop.scheduler.policy, self._loop.policy_name
        found = []
        tickets = {user["tickets"] for user in self._store.users()}
        shared = any(group.tickets is not None for group in groups_of(self._store))
        if not policy.uses_tickets and (len(tickets) > 1 or shared):
            found.append(f"policy {name} ignores the tickets of users; fair-afs follows them")
        jobs = list(self._loop.jobs.values())
        weights = sum(j.spec["weight"] != 1.0 for j in jobs)
        if not policy.uses_weights and weights:
            found.append(f"policy {name} ignores weights, and {_have(weights)} one")
        lengths = sum(any(j.spec.get(k) for k in ("expected_s", "iterations")) for j in jobs)
        if not policy.uses_lengths and lengths:
            found.append(
                f"policy {name} ignores how long jobs take, and {_have(lengths)} said it; estimates use it"
            )
        return found


def _have(count: int) -> str:
    return f"{counted(count, 'unfinished job has', 'unfinished jobs have')}"


def _waits(job: LiveJob) -> bool:
    return not job.gpus and not job.target_gpus and not job.is_over


def _above(limits: Limits, use: m.LimitsUse, name: str) -> Iterable[str]:
    """Limits that are below the present use, and what follows."""
    pairs: list[tuple[str, float | None, float, str]] = [
        ("GPUs at once", limits.max_gpus, use.gpus, "jobs shrink or wait until it is kept"),
        ("running jobs", limits.max_running_jobs, use.running_jobs, "jobs wait until it is kept"),
        ("waiting jobs", limits.max_waiting_jobs, use.waiting_jobs, "those stay, and new ones are refused"),
        (
            "GPU hours of this week",
            limits.gpu_hours_per_week,
            use.gpu_hours_of_week,
            "jobs wait until Monday",
        ),
    ]
    pairs += [
        (f"GPUs of type {word} at once", most, use.gpus_of_type.get(word, 0), "jobs shrink or wait")
        for word, most in limits.max_gpus_of_type
    ]
    for what, most, now, then in pairs:
        if most is not None and now > most:
            yield f"{name} has {now:g} {what}, more than the limit of {most:g}: {then}"
