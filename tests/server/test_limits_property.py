"""No limit is exceeded at any moment of random histories, by what workers hold, not only by what was decided."""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from tests.server.fakes import Fleet, Here, run, server

from shoal.core.limits import Limits
from shoal.executors.base import NodeInfo
from shoal.server.loop.live_job import LiveJob, LiveWorker
from shoal.server.loop.people import groups_of, users_of

USERS = ("ada", "ben", "cyd")
NODES = (NodeInfo("n0", 3, "v100", True), NodeInfo("n1", 3, "v100", True), NodeInfo("n2", 2, "a100", True))
STEPS = 40


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
    }


async def act(here: Here, rng: random.Random, number: int) -> None:
    """Something that users, jobs and operators do."""
    jobs, user = list(here.loop.jobs.values()), rng.choice(USERS)
    what = rng.choice(
        ["submit"] * 4 + ["array", "end", "end", "end", "cancel", "pause", "resume", "limit", "group"]
    )
    if what == "submit":
        low = rng.randint(1, 3)
        spec = rng.choice(
            [{"gpus": str(low)}, {"gpus": f"{low}..{low + 3}"}, {"gpus": f"1..{low}", "resize": "restart"}]
        )
        await here.submit(user=user, priority=rng.randint(-1, 1), name=f"j{number}", **spec)
    elif what == "array":
        body = {
            "command": ["x"],
            "workdir": "/tmp",
            "array": f"0-4%{rng.randint(1, 3)}",
            "name": f"a{number}",
        }
        await here.post("/arrays", user=user, json=body, status=201)
    elif what == "end" and here.fleet.running:
        here.fleet.end(rng.choice(sorted(here.fleet.running)), rng.choice([0, 0, 1]))
    elif what == "limit":
        await here.call("PATCH", f"/users/{user}", json={"limits": random_limits(rng)}, status=200)
    elif what == "group":
        await here.call("PATCH", "/groups/all", json={"limits": random_limits(rng)}, status=200)
    elif what in ("cancel", "pause", "resume") and jobs:
        await here.http.post(
            f"/api/v1/jobs/{rng.choice(jobs).id}/{what}",
            headers={"Authorization": f"Bearer {here.tokens['admin']}"},
        )


@pytest.mark.parametrize("policy", ["fair-afs", "fifo", "afs-p"])
@pytest.mark.parametrize("seed", range(2))
def test_no_limit_is_exceeded_at_any_moment(tmp_path: Path, policy: str, seed: int) -> None:
    rng = random.Random(seed)
    fleet = Fleet(NODES)

    async def story() -> None:
        async with server(tmp_path, fleet=fleet, policy=policy) as here:
            watch = Watch(here)
            start, wake = fleet.start, fleet.wake
            fleet.start = lambda spec: (start(spec), watch.check())[0]  # type: ignore[method-assign]
            fleet.wake = lambda worker: (wake(worker), watch.check())[0]  # type: ignore[method-assign]
            await here.post("/groups", json={"name": "all", "limits": random_limits(rng)}, status=201)
            for user in USERS:
                await here.add_user(user)
                change = {"limits": random_limits(rng), "group": rng.choice(["all", ""])}
                await here.call("PATCH", f"/users/{user}", json=change, status=200)
            for number in range(STEPS):
                await act(here, rng, number)
                watch.note()
                turns = rng.randint(0, 6)
                count = iter(range(turns + 1))
                live = tuple(j.id for j in here.loop.jobs.values())
                await here.until(lambda c=count, t=turns: next(c) >= t, train=live)  # type: ignore[misc]
                watch.check()
                here.check()
            assert watch.checks > STEPS

    run(story())
