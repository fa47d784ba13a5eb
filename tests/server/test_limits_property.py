"""No limit is exceeded at any moment of random histories, by what workers hold, not only by what was decided."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from tests.server.fakes import Fleet, Here, run, server

from shoal.core.events import Timer
from shoal.core.limits import Limits
from shoal.executors.base import NodeInfo, NodeLost
from shoal.server.api.models import JobState
from shoal.server.loop.live_job import LiveJob, LiveWorker
from shoal.server.loop.people import groups_of, users_of

USERS = ("ada", "ben", "cyd")
NODES = (NodeInfo("n0", 3, "v100", True), NodeInfo("n1", 3, "v100", True), NodeInfo("n2", 2, "a100", True))
STEPS = 50


class Watch:
    """Compares what jobs hold with the limits, whenever a worker starts or wakes. A limit that was lowered below the
    present use need not hold at once, but the use must not grow."""

    def __init__(self, here: Here) -> None:
        self.here = here
        self.most: dict[tuple[str, ...], int] = {}
        self.checks = 0

    def check(self) -> None:
        for key, limit, use in self._uses():
            allowed = max(limit, self.most.get(key, use))
            assert use <= allowed, f"{key}: {use} are in use, the limit is {limit}"
            self.checks += 1
        self.note()

    def note(self) -> None:
        """Limits may have changed: from now on each use may be as large as now, or as its limit."""
        self.most = {key: max(limit, use) for key, limit, use in self._uses()}

    def _uses(self) -> Iterable[tuple[tuple[str, ...], int, int]]:
        store, jobs = self.here.control.store, list(self.here.loop.jobs.values())
        users = users_of(store)
        for user in users:
            yield from _of(("user", user.name), user.limits, [j for j in jobs if j.user == user.name])
        for group in groups_of(store):
            members = {u.name for u in users if u.group == group.name}
            yield from _of(("group", group.name), group.limits, [j for j in jobs if j.user in members])
        for array in {j.array for j in jobs if "throttle" in j.spec}:
            mine = [j for j in jobs if j.array == array]
            limits = Limits(max_running_jobs=mine[0].spec["throttle"][1])
            yield from _of(("array", str(array)), limits, mine)


def takes_a_place(job: LiveJob, worker: LiveWorker) -> bool:
    """Whether a worker takes the place of one that still holds its GPU. Limits count the two once."""
    old = job.workers.get(worker.replaces or "")
    if old is None or not old.holds_gpu:
        return False
    assert job.resize.value == "live"
    assert [w.id for w in job.workers.values() if w.replaces == old.id] == [worker.id], "two take one place"
    assert (old.replaces or "") not in job.workers, "a third worker in one place"
    return worker.holds_gpu


def _type(worker: LiveWorker) -> str:
    return NODES[worker.device[0]].gpu_type


def _of(
    key: tuple[str, ...], limits: Limits, jobs: list[LiveJob]
) -> Iterable[tuple[tuple[str, ...], int, int]]:
    held = [w for j in jobs for w in j.workers.values() if w.holds_gpu and not takes_a_place(j, w)]
    if limits.max_gpus is not None:
        yield (*key, "max_gpus"), limits.max_gpus, sum(w.gpus for w in held)
    if limits.max_running_jobs is not None:
        yield (*key, "max_running_jobs"), limits.max_running_jobs, sum(j.gpus > 0 for j in jobs)
    for gpu_type, most in limits.max_gpus_of_type:
        there = [w for j in jobs for w in j.workers.values() if w.holds_gpu and _type(w) == gpu_type]
        second = [
            w
            for j in jobs
            for w in j.workers.values()
            if takes_a_place(j, w) and _type(w) == _type(j.workers[w.replaces or ""]) == gpu_type
        ]
        yield (*key, gpu_type), most, sum(w.gpus for w in there) - sum(w.gpus for w in second)


def random_limits(rng: random.Random) -> dict[str, Any]:
    return {
        "max_gpus": rng.choice([None, 1, 2, 3, 5]),
        "max_running_jobs": rng.choice([None, 1, 2, 3]),
        "max_gpus_of_type": rng.choice([None, {"v100": 2}, {"a100": 1, "v100": 3}]),
        "max_waiting_jobs": rng.choice([None, 1, 3, 6]),
        "gpu_hours_per_week": rng.choice([None, 0.2, 1.0]),
    }


class Acts:
    """What users, jobs, operators and machines do."""

    def __init__(self, here: Here, rng: random.Random) -> None:
        self.here, self.rng, self.number = here, rng, 0
        self.refused = self.used_up = 0

    async def anything(self) -> None:
        self.number += 1
        often = [self.submit] * 4 + [self.end] * 3
        rare = [self.array, self.change, self.limit, self.group, self.scale, self.drain, self.lose_node]
        await self.rng.choice([*often, *rare, self.slow, self.time, self.time])()

    @property
    def jobs(self) -> list[LiveJob]:
        return list(self.here.loop.jobs.values())

    async def submit(self) -> None:
        low = self.rng.randint(1, 3)
        kinds: list[dict[str, Any]] = [
            {"gpus": str(low), "per_gpu": self.rng.random() < 0.5},
            {"gpus": f"{low}..{low + 3}", "replace_stragglers": True},
            {"gpus": f"1..{low}", "resize": "restart"},
        ]
        extra = {"priority": self.rng.randint(-1, 1), "name": f"j{self.number}"}
        await self._submit("/jobs", {**self.rng.choice(kinds), **extra}, 1)

    async def array(self) -> None:
        extra = {"array": f"0-4%{self.rng.randint(1, 3)}", "name": f"a{self.number}"}
        await self._submit("/arrays", extra, 5)

    async def _submit(self, path: str, extra: dict[str, Any], count: int) -> None:
        """A submission is accepted exactly if no limit of waiting jobs is exceeded then."""
        here, user = self.here, self.rng.choice(USERS)
        await settled(here)  # the limits that count are those of the last decision
        fits = all(
            sum(waits(j) for j in self.jobs if j.user in users) + count <= most
            for users, most in self._most_waiting(user)
        )
        body = {"command": ["x"], "workdir": "/tmp", "per_gpu": True, **extra}
        await here.post(path, user=user, json=body, status=201 if fits else 409)
        self.refused += not fits

    def _most_waiting(self, user: str) -> Iterable[tuple[set[str], int]]:
        users = users_of(self.here.control.store)
        mine = next(u for u in users if u.name == user)
        if mine.limits.max_waiting_jobs is not None:
            yield {user}, mine.limits.max_waiting_jobs
        for group in groups_of(self.here.control.store):
            if group.name == mine.group and group.limits.max_waiting_jobs is not None:
                yield {u.name for u in users if u.group == group.name}, group.limits.max_waiting_jobs

    async def end(self) -> None:
        if self.here.fleet.running:
            how = self.rng.choice([(0, None), (0, None), (1, None), (None, "SIGKILL")])
            self.here.fleet.end(self.rng.choice(sorted(self.here.fleet.running)), *how)

    async def change(self) -> None:
        if self.jobs:
            await self._maybe(self.rng.choice(["cancel", "pause", "resume", "resume"]))

    async def scale(self) -> None:
        if self.jobs:
            low = self.rng.randint(1, 3)
            await self._maybe("scale", {"min": low, "max": low + self.rng.randint(0, 3)})

    async def _maybe(self, verb: str, body: dict[str, Any] | None = None) -> None:
        """Ask for what may be refused in the job's present state."""
        await self.here.http.post(
            f"/api/v1/jobs/{self.rng.choice(self.jobs).id}/{verb}",
            headers={"Authorization": f"Bearer {self.here.tokens['admin']}"},
            json=body,
        )

    async def limit(self) -> None:
        change = {"limits": random_limits(self.rng)}
        await self.here.call("PATCH", f"/users/{self.rng.choice(USERS)}", json=change, status=200)

    async def group(self) -> None:
        change = {"limits": random_limits(self.rng)}
        await self.here.call("PATCH", "/groups/all", json=change, status=200)

    async def drain(self) -> None:
        """Take a node out of use, or bring it back."""
        what = self.rng.choice(["drain", "uncordon", "uncordon"])
        await self.here.post(f"/nodes/{self.rng.choice(NODES).name}/{what}")

    async def lose_node(self) -> None:
        """A machine is lost with its workers, and comes back."""
        node, fleet = self.rng.choice(NODES), self.here.fleet
        for worker in [w.worker for w in fleet.running.values() if w.node == node.name]:
            fleet._ended(worker, None, "SIGKILL", False)
        fleet.on_node(NodeLost(node.name, "its machine is gone"))
        await settled(self.here)
        fleet.join(node)

    async def slow(self) -> None:
        """A worker of a live job becomes slow: it is replaced."""
        live = sorted(self.here.fleet.live)
        if live:
            self.here.fleet.slow[self.rng.choice(live)] = 3.0

    async def time(self) -> None:
        """Time passes, at most until the scheduler wants to decide again. A quota may be used up then."""
        await settled(self.here)
        loop = self.here.loop
        wake = loop._inbox._wake
        most_s = 1800.0 if wake is None else max(wake.when() - asyncio.get_running_loop().time(), 0.0)
        loop.clock.offset_s += min(self.rng.choice([600.0, 1800.0]), most_s)
        loop.take_in(Timer())
        await settled(self.here)
        for users, quota_h in self._quotas():
            if self.here.control.services.limits_use.of(users).gpu_hours_of_week >= quota_h:
                self.used_up += 1
                targets = {j.name: j.target_gpus for j in self.jobs if j.user in users and j.target_gpus}
                assert not targets, f"{users} have used up their {quota_h} GPU hours"

    def _quotas(self) -> Iterable[tuple[set[str], float]]:
        users = users_of(self.here.control.store)
        for user in users:
            if user.limits.gpu_hours_per_week is not None:
                yield {user.name}, user.limits.gpu_hours_per_week
        for group in groups_of(self.here.control.store):
            if group.limits.gpu_hours_per_week is not None:
                yield {u.name for u in users if u.group == group.name}, group.limits.gpu_hours_per_week


def waits(job: LiveJob) -> bool:
    return not job.gpus and not job.target_gpus and job.life.state in (JobState.PENDING, JobState.PAUSED)


async def settled(here: Here) -> None:
    await here.until(
        lambda: here.loop.decided_s is not None and not here.loop._inbox and not here.loop.reconciler
    )


@pytest.mark.parametrize("policy", ["fair-afs", "fifo", "afs-p"])
@pytest.mark.parametrize("seed", range(2))
def test_no_limit_is_exceeded_at_any_moment(tmp_path: Path, policy: str, seed: int) -> None:
    rng = random.Random(seed)
    fleet = Fleet(NODES)

    async def story() -> None:
        async with server(tmp_path, fleet=fleet, policy=policy) as here:
            watch, acts = Watch(here), Acts(here, rng)
            start, wake = fleet.start, fleet.wake
            fleet.start = lambda spec: (start(spec), watch.check())[0]  # type: ignore[method-assign]
            fleet.wake = lambda worker: (wake(worker), watch.check())[0]  # type: ignore[method-assign]
            await here.post("/groups", json={"name": "all", "limits": random_limits(rng)}, status=201)
            for user in USERS:
                await here.add_user(user)
                change = {"limits": random_limits(rng), "group": rng.choice(["all", ""])}
                await here.call("PATCH", f"/users/{user}", json=change, status=200)
            for _ in range(STEPS):
                await acts.anything()
                watch.note()
                turns = rng.randint(0, 6)
                count = iter(range(turns + 1))
                live = tuple(j.id for j in here.loop.jobs.values())
                await here.until(lambda c=count, t=turns: next(c) >= t, train=live)  # type: ignore[misc]
                watch.check()
                here.check()
            assert watch.checks > STEPS

    run(story())
