"""Live jobs are measured at other sizes, and the policy decides on what was measured."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shoal.executors.base import WorkerSpec

from .fakes import Fleet, Here, run, server

COOL_DOWN_S = 0.2
Curve = Callable[[int], float]


def perfect(workers: int) -> float:
    return 0.1 / workers


def flat(workers: int) -> float:
    return 0.1


def root(workers: int) -> float:
    return 0.1 / workers**0.5


async def submit(here: Here, name: str, curve: Curve, gpus: str = "1..4") -> int:
    """A live job with a command of its own, and 1000000 steps of these lengths."""
    here.loop.scheduler.cool_down_s = COOL_DOWN_S
    job: int = (await here.submit(gpus, name=name, command=["train", name], iterations=1e6))["id"]
    here.fleet.curves[job] = curve
    return job


async def settle(here: Here, jobs: dict[int, Curve], what: Callable[[], Any], turns: int = 1500) -> None:
    """Train until this holds."""
    for _ in range(turns):
        if what():
            return
        for job in jobs:
            here.fleet.step(job, total=1_000_000)
        await asyncio.sleep(0.005)
    sizes = {j: (here.gpus(j), here.loop.jobs[j].target_gpus) for j in jobs}
    raise AssertionError(f"it did not come to pass: {sizes}, {here.loop.scheduler.exploration}")


@pytest.mark.parametrize("policy", ["optimus", "afs-p", "fair-afs"])
def test_a_job_that_does_not_scale_gives_its_gpus_to_one_that_does(tmp_path: Path, policy: str) -> None:
    async def story() -> None:
        async with server(tmp_path, 4, policy=policy, fleet=Fleet(4)) as here:
            first = await submit(here, "perfect", perfect)
            jobs: dict[int, Curve] = {first: perfect}
            await settle(here, jobs, lambda: here.gpus(first) == 4)
            second = await submit(here, "flat", flat)
            jobs[second] = flat
            await settle(here, jobs, lambda: (here.gpus(first), here.gpus(second)) == (3, 1))
            exploration = here.loop.scheduler.exploration
            await settle(here, jobs, lambda: not exploration.trials)
            assert (here.loop.jobs[first].target_gpus, here.loop.jobs[second].target_gpus) == (3, 1)
            events = (await here.get("/events", params={"type": "job.measuring"}))["items"]
            assert any("measuring at" in e["message"] and "steps" in e["message"] for e in events)
            ends = (await here.get("/events", params={"type": "job.measured"}))["items"]
            assert any("measured" in e["message"] for e in ends)

    run(story())


@pytest.mark.parametrize(
    ("policy", "shares"), [("optimus", (4, 3, 1)), ("afs-p", (5, 2, 1)), ("fair-afs", (5, 2, 1))]
)
def test_three_jobs_end_with_the_shares_that_their_true_speeds_give(
    tmp_path: Path, policy: str, shares: tuple[int, ...]
) -> None:
    """The shares are those that tests/sim/test_exploration.py finds under true profiles of these curves."""

    async def story() -> None:
        async with server(tmp_path, 8, policy=policy, fleet=Fleet(8)) as here:
            jobs: dict[int, Curve] = {}
            for name, curve in (("perfect", perfect), ("root", root), ("flat", flat)):
                jobs[await submit(here, name, curve, "1..8")] = curve
            await settle(here, jobs, lambda: tuple(map(here.gpus, jobs)) == shares, turns=6000)
            exploration = here.loop.scheduler.exploration
            await settle(here, jobs, lambda: not exploration.trials, turns=6000)
            assert tuple(here.loop.jobs[job].target_gpus for job in jobs) == shares

    run(story())


def test_profile_and_show_tell_what_is_measured_fitted_and_only_estimated(tmp_path: Path) -> None:
    async def story() -> None:
        async with server(tmp_path, 4, policy="max-min") as here:
            job = await submit(here, "perfect", perfect)
            await settle(here, {job: perfect}, lambda: here.loop.jobs[job].progress.speed)
            shown = await here.get(f"/jobs/{job}")
            assert shown["speedup"] > 1
            assert not shown["speedup_measured"], "nothing was measured with one GPU"
            found = await here.get(f"/jobs/{job}/profile")
            at = {point["gpus"]: point for point in found["points"]}
            assert at[4]["measured"]
            assert not at[1]["measured"]
            assert at[1]["low_speed"] < at[1]["speed"] < at[1]["high_speed"]
            assert at[4]["fitted_speed"] == pytest.approx(at[4]["speed"], rel=0.1)
            assert found["next_gpus"] in (1, 2, 3)
            assert found["measuring"] is None

    run(story())


def test_a_job_ends_at_its_target_loss_if_that_comes_before_its_last_step(tmp_path: Path) -> None:
    async def story() -> None:
        async with server(tmp_path, 2, policy="max-min") as here:
            job = (await here.submit("1..2", target_loss=0.01, iterations=1e6))["id"]
            await here.until(lambda: here.state(job) == "running")
            for _ in range(60):
                here.fleet.step(job, total=1_000_000)
                await asyncio.sleep(0.002)
            await here.until(lambda: (here.loop.jobs[job].progress.step or 0) >= 60)
            left = (await here.get(f"/jobs/{job}"))["remaining"]
            assert left["basis"] == "its loss curve, before its last step"
            for _ in range(2000):  # its loss is 1 / (1 + step)
                if here.state(job) == "succeeded":
                    break
                here.fleet.step(job, total=1_000_000)
                await asyncio.sleep(0.002)
            assert here.state(job) == "succeeded"
            over = await here.get(f"/jobs/{job}")
            assert "its loss reached 0.01 at step 99 (target 0.01)" in over["message"]
            assert (await here.get("/events", params={"job": job, "type": "job.reached"}))["items"]

    run(story())


class Preparing(Fleet):
    """Its workers start, and do not come as far as `shoal.torch.init`."""

    def start(self, worker: WorkerSpec) -> None:
        self.running[worker.worker] = worker


def test_a_target_that_is_replaced_while_new_workers_prepare_is_counted(tmp_path: Path) -> None:
    async def story() -> None:
        async with server(tmp_path, 4, policy="max-min", fleet=Preparing(4)) as here:
            job = await submit(here, "first", perfect)
            await here.until(lambda: here.gpus(job) == 4)
            before = here.loop.metrics.superseded._value.get()
            await submit(here, "second", perfect)
            await here.until(lambda: here.loop.jobs[job].target_gpus == 2)
            assert here.loop.metrics.superseded._value.get() == before + 1

    run(story())
