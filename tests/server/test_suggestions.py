"""`why` suggests only what works: in random states, every suggestion is accepted and does what it says."""

from __future__ import annotations

import asyncio
import random
import shlex
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shoal.core.events import Cancelled, Event, Held, Rescaled, Submitted
from shoal.core.plan import Plan
from shoal.executors.base import NodeInfo

from .fakes import Here, run, server

NODES = (NodeInfo("a", 4, "v100", False), NodeInfo("b", 2, "k80", False), NodeInfo("c", 2, "k80", False))
USERS = ("ada", "bob")
#: These policies settle accounts by the clock, so a moment later they may decide otherwise.
BY_THE_CLOCK = ("fair-afs", "gandiva-fair", "themis")

#: The events that one suggestion leads to, at most.
ASKED_FOR = Counter[type[Event]]({Held: 1, Rescaled: 1, Submitted: 1, Cancelled: 1})


class World:
    """Random commands of users and ends of workers."""

    def __init__(self, here: Here, rng: random.Random) -> None:
        self.here, self.rng, self.drained = here, rng, False

    @property
    def jobs(self) -> list[Any]:
        return [j for j in self.here.loop.jobs.values() if j.life.state.value != "stopping"]

    async def settle(self) -> None:
        """Until the last event was decided on."""
        await self.here.until(lambda: not self.here.loop._inbox and not self.here.loop.reconciler)

    async def anything(self) -> None:
        does = [self.submit] * 4 + [self.end, self.fail, self.pause, self.resume, self.drain, self.array]
        await self.rng.choice([*does, self.limit])()
        await self.settle()

    async def submit(self) -> None:
        low = self.rng.randint(1, 4)
        high = self.rng.randint(low, 4)
        resize = self.rng.choice(["live", "restart"] if high > low else ["never", "restart", "live"])
        types = self.rng.choice([[], [], ["v100"], ["k80"]])
        user = self.rng.choice(USERS)
        mine = [j.id for j in self.jobs if j.user == user]
        after = [{"job": str(self.rng.choice(mine)), "on": "any"}] if mine and self.rng.random() < 0.2 else []
        await self.here.submit(
            f"{low}..{high}", user=user, resize=resize, gpu_types=types, after=after,
            expected_s=self.rng.choice([None, 10.0, 1000.0]), priority=self.rng.randint(-1, 1),
            max_restarts=self.rng.choice([0, 1]),
        )  # fmt: skip

    async def array(self) -> None:
        body = {"command": ["x"], "workdir": "/tmp", "array": f"0-3%{self.rng.randint(1, 3)}"}
        await self.here.post("/arrays", user=self.rng.choice(USERS), json=body, status=201)

    async def limit(self) -> None:
        """An admin changes the limits of a user, or of the group of all."""
        limits = {
            "max_gpus": self.rng.choice([None, 1, 3, 5]),
            "max_running_jobs": self.rng.choice([None, 1, 3]),
            "max_gpus_of_type": self.rng.choice([None, {"v100": 2}, {"k80": 1}]),
            "gpu_hours_per_week": self.rng.choice([None, None, 0.0, 100.0]),
        }
        path = self.rng.choice(["/groups/all", *(f"/users/{user}" for user in USERS)])
        await self.here.call("PATCH", path, json={"limits": limits}, status=200)

    async def end(self) -> None:
        workers = [w for j in self.jobs if j.resize.value != "live" for w in j.workers]
        for worker in self.rng.sample(workers, min(len(workers), 2)):
            self.here.fleet.end(worker)
        await asyncio.sleep(0)

    async def fail(self) -> None:
        workers = [w for j in self.jobs for w in j.workers]
        for worker in self.rng.sample(workers, min(len(workers), 1)):
            self.here.fleet.end(worker, *self.rng.choice([(1, None), (None, "SIGKILL")]))
        await asyncio.sleep(0)

    async def pause(self) -> None:
        if self.jobs:
            await self.here.post(f"/jobs/{self.rng.choice(self.jobs).id}/pause")

    async def resume(self) -> None:
        paused = [j for j in self.jobs if j.life.state.value == "paused"]
        if paused:
            await self.here.post(f"/jobs/{self.rng.choice(paused).id}/resume")

    async def drain(self) -> None:
        self.drained = not self.drained
        await self.here.post("/nodes/b/drain" if self.drained else "/nodes/b/uncordon")

    async def try_suggestions(self) -> str | None:
        """Carry out one suggestion as the owner of the job, if there is one. Returns what it changed."""
        found = []
        for job in self.jobs:
            if job.gpus <= job.target_gpus:  # nothing of it is on its way to another job
                why = await self.here.get(f"/jobs/{job.id}/why", user=job.user)
                found += [(job, could) for could in why["could"]]
        if not found:
            return None
        # The rarest kind first, so that all kinds are tried.
        kinds = Counter(could["change"] for _, could in found)
        rarest = min(kinds, key=lambda change: (kinds[change], change))
        job, _ = self.rng.choice([(job, could) for job, could in found if could["change"] == rarest])
        why = await self.here.get(f"/jobs/{job.id}/why", user=job.user)  # others were asked since
        could = next((could for could in why["could"] if could["change"] == rarest), None)
        if could is None:
            return None
        if could["change"] == "gpu_types":
            await self._without_types(job, could)
        else:
            await self._command(job, could)
        return rarest

    async def _command(self, job: Any, could: dict[str, Any]) -> None:
        before = job.target_gpus
        _, is_command, command = could["sentence"].partition(": shoal ")
        assert is_command, could
        something_else = self._something_else()
        waits = "it would wait for GPUs then" in command
        verb, name, *options = shlex.split(command.partition(" (")[0])
        body = {options[0].removeprefix("--"): int(options[1])} if options else None
        await self.here.post(f"/jobs/{name}/{verb}", json=body, user=job.user)
        await self.settle()
        if not something_else() and self.here.loop.policy_name not in BY_THE_CLOCK:
            assert bool(job.target_gpus) is not waits, (could, job)
            assert job.target_gpus > before or waits, (could, job)

    async def _without_types(self, job: Any, could: dict[str, Any]) -> None:
        """Cancel it and submit it again on any type of GPU."""
        something_else = self._something_else()
        again = {k: job.spec[k] for k in ("gpus", "resize", "priority", "max_restarts", "expected_s")}
        await self.here.post(f"/jobs/{job.id}/cancel", user=job.user)
        made = await self.here.submit(user=job.user, **again)
        await self.settle()
        if not something_else() and self.here.loop.policy_name not in BY_THE_CLOCK:
            assert self.here.loop.jobs[made["id"]].target_gpus, could

    def _something_else(self) -> Callable[[], bool]:
        """Whether something happens by itself from now on: a worker ends, or a rest is over. Then the suggestion may
        be out of date."""
        loop, seen = self.here.loop, Counter[type[Event]]()
        scheduler, step = loop.scheduler, loop.scheduler.step
        is_late = bool(loop._inbox) or bool(loop.reconciler)

        def record(now_s: float, events: list[Event]) -> Plan:
            seen.update(map(type, events))
            return step(now_s, events)

        def stop() -> bool:
            del scheduler.step
            return is_late or not seen <= ASKED_FOR

        scheduler.step = record
        return stop


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("policy", ["fifo", "fair-afs", "max-min", "themis", "gandiva-fair", "srtf"])
def test_every_suggestion_in_a_random_state_is_accepted_and_does_what_it_says(
    tmp_path: Path, policy: str, seed: int
) -> None:
    tried: Counter[str | None] = Counter()

    async def story() -> None:
        async with server(tmp_path, NODES, policy=policy) as here:
            await here.post("/groups", json={"name": "all"}, status=201)
            for user in USERS:
                await here.add_user(user)
                await here.call("PATCH", f"/users/{user}", json={"group": "all"}, status=200)
            world = World(here, random.Random(seed))
            for _ in range(25):
                await world.anything()
                tried[await world.try_suggestions()] += 1

    run(story())
    del tried[None]
    assert tried.total() > 2


@pytest.mark.parametrize("policy", ["fifo", "max-min", "srtf"])
def test_the_suggestion_to_use_any_type_of_gpu_starts_the_job(tmp_path: Path, policy: str) -> None:
    async def story() -> None:
        async with server(tmp_path, NODES, policy=policy) as here:
            for user in USERS:
                await here.add_user(user)
            first = (await here.submit("4", user="ada", gpu_types=["v100"], expected_s=1.0))["id"]
            await here.until(lambda: here.gpus(first) == 4)
            await here.submit("2", user="bob", gpu_types=["v100"], expected_s=1000.0)
            world = World(here, random.Random(0))
            await world.settle()
            assert await world.try_suggestions() == "gpu_types"

    run(story())


def test_a_job_that_waits_for_a_drained_node_is_told_so(tmp_path: Path) -> None:
    async def story() -> None:
        async with server(tmp_path, NODES) as here:
            for node in ("b", "c"):
                await here.post(f"/nodes/{node}/drain")
            job = (await here.submit("2", gpu_types=["k80"]))["id"]
            await here.until(lambda: here.loop.decided_s is not None and not here.loop.reconciler)
            reason = (await here.get(f"/jobs/{job}/why"))["reason"]
            assert reason["code"] == "WaitingForCapacity"
            assert "b, c with 4 GPUs are out of use" in reason["sentence"]
            assert "shoal node uncordon b" in reason["sentence"]
            await here.post("/nodes/b/uncordon")
            await here.until(lambda: here.state(job) == "running")

    run(story())


def test_a_job_that_its_policy_caps_is_not_told_that_more_would_not_help(tmp_path: Path) -> None:
    async def story() -> None:
        async with server(tmp_path, 4, policy="themis") as here:
            job = (await here.submit("1..4", requested_gpus=2))["id"]
            await here.until(lambda: here.gpus(job) == 2)
            reason = (await here.get(f"/jobs/{job}/why"))["reason"]
            assert "policy themis gives it 2 at most" in reason["sentence"]

    run(story())


def test_shares_add_up_and_hide_what_a_user_may_not_see(tmp_path: Path) -> None:
    async def story() -> None:
        async with server(tmp_path, 4) as here:
            for user in USERS:
                await here.add_user(user)
            await here.submit("1", user="ada")
            await here.submit("2", user="bob")
            await here.until(lambda: here.loop.devices.used == 3)
            found = await here.get("/shares", user="ada")
            lines = {s["user"]: s for s in found["items"]}
            assert sum(s["gpus"] for s in found["items"]) + found["idle_gpus"] == found["total_gpus"] == 4
            received = sum(s["received_gpu_s"] for s in found["items"])
            assert received + found["idle_gpu_s"] == pytest.approx(found["capacity_gpu_s"])
            assert lines["ada"]["running_jobs"] == 1
            assert lines["bob"]["running_jobs"] is None
            await here.post("/nodes/local/drain")
            await here.until(lambda: here.loop.scheduler.supply.total_gpus == 0)
            assert (await here.get("/shares"))["total_gpus"] == 0

    run(story())
