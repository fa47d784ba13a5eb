"""Live jobs are measured at other sizes, and the policy decides on what was measured."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shoal.executors.base import WorkerSpec
from shoal.scheduler.exploration.trial import AtSize
from shoal.wire.messages import Report

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
            assert found["next_gpus"] is None
            assert found["next_measurement"] == "nothing: policy max-min does not decide by speed"
            assert found["measuring"] is None

    run(story())


def test_profile_says_what_exploration_would_measure_next_or_why_it_measures_nothing(tmp_path: Path) -> None:
    async def story() -> None:
        async with server(tmp_path, 8, policy="optimus") as here:
            jobs: dict[int, Curve] = {}
            for name in ("one", "two"):
                jobs[await submit(here, name, perfect, "2..8:2")] = perfect
            here.loop.scheduler.cool_down_s = 3600.0  # so that no trial begins
            here.loop.scheduler.exploration.budget.share = 1.0
            first = next(iter(jobs))
            speeds = [here.loop.profiles.learner(here.loop.jobs[job]) for job in jobs]
            await settle(here, jobs, lambda: all(speed.is_measured(4, "virtual") for speed in speeds))

            async def told() -> tuple[int | None, str]:
                found = await here.get(f"/jobs/{first}/profile")
                return found["next_gpus"], found["next_measurement"]

            gpus, sentence = await told()
            for _ in range(
                100
            ):  # while the present speeds are little known, a trial may not be worth its cost
                if gpus is not None:
                    break
                turns = iter(range(10))
                await settle(here, jobs, lambda turns=turns: next(turns, None) is None)
                gpus, sentence = await told()
            assert gpus in (2, 6), f"a multiple of its step that two jobs could exchange: {sentence}"
            assert sentence.startswith(f"next at {gpus} GPUs")
            scheduler = here.loop.scheduler
            model, now_s = here.loop.jobs[first].model, here.loop.now_s()
            for size in (2, 6):
                scheduler.exploration.history.add(AtSize(model, "virtual", size), now_s, failed=True)
            gpus, sentence = await told()
            assert gpus is None
            assert "not at 2 GPUs for" in sentence
            assert "a worker failed there" in sentence
            scheduler.exploration = None
            assert "exploration is off" in (await told())[1]

    run(story())


def test_a_job_with_an_autoscaler_is_left_to_it(tmp_path: Path) -> None:
    async def story() -> None:
        async with server(tmp_path, 4, policy="optimus") as here:
            job = (await here.submit("1..4", autoscale="efficiency", iterations=1e6))["id"]
            await settle(here, {job: perfect}, lambda: here.loop.jobs[job].progress.speed)
            found = await here.get(f"/jobs/{job}/profile")
            assert (
                found["next_measurement"]
                == "nothing: its autoscaler chooses the sizes at which it is measured"
            )

    run(story())


def test_a_worker_that_fails_at_the_size_of_a_trial_blames_the_size_and_profile_says_so(
    tmp_path: Path,
) -> None:
    async def story() -> None:
        async with server(tmp_path, 4, policy="optimus", fleet=Fleet(4)) as here:
            jobs: dict[int, Curve] = {await submit(here, "perfect", perfect): perfect}
            here.loop.scheduler.cool_down_s = COOL_DOWN_S
            spec = {"name": "flat", "command": ["train", "flat"], "iterations": 1e6, "max_restarts": 100}
            fails: int = (await here.submit("1..4", **spec))["id"]
            here.fleet.curves[fails], jobs[fails] = flat, flat
            exploration = here.loop.scheduler.exploration

            def measured() -> bool:
                trial = exploration.trial_of(fails)
                return trial is not None and trial.member(fails).is_measured

            await settle(here, jobs, measured)
            size = exploration.trial_of(fails).member(fails).gpus
            here.fleet.end(here.fleet.crew(fails)[0].id, code=1)
            model = here.loop.jobs[fails].model
            await settle(here, jobs, lambda: exploration.history.failed_sizes(model, "virtual") == [size])
            ends = (await here.get("/events", params={"job": fails, "type": "job.measured"}))["items"]
            assert any(f"a worker of job {fails} failed at {size} GPU" in e["message"] for e in ends)

    run(story())


@pytest.mark.parametrize("spec", [{"gpus": "1"}, {"gpus": "1..2", "resize": "restart"}])
def test_a_target_loss_that_nobody_would_check_is_refused(tmp_path: Path, spec: dict[str, str]) -> None:
    async def story() -> None:
        async with server(tmp_path) as here:
            body = {"command": ["true"], "workdir": "/", "target_loss": 0.5, **spec}
            reply = await here.call("POST", "/jobs", json=body, status=422)
            assert "target_loss: only a job that is resized live ends at its target" in str(reply)

    run(story())


def test_one_lucky_batch_does_not_end_a_job_with_a_target_loss(tmp_path: Path) -> None:
    async def story() -> None:
        async with server(tmp_path, 1, policy="max-min") as here:
            job = (await here.submit("1..1", resize="live", target_loss=0.1, iterations=1e6))["id"]
            await here.until(lambda: here.state(job) == "running", train=(job,))
            here.fleet.step(job)
            worker = here.fleet.crew(job)[0]
            losses = [0.5, 0.5, 0.05, 0.5, 0.5, 0.5, 0.09, 0.09, 0.09]
            reached = []
            for step, loss in enumerate(losses, start=2):
                worker.send(Report(step=step, steps=1, workers=1, samples=1.0, values={"loss": loss}))
                await here.until(lambda step=step: here.loop.jobs[job].progress.step == step)
                reached.append(here.loop.jobs[job].reached_step is not None)
            assert reached == [False] * 8 + [True], "three of the last five reports"

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
            # The median of the losses of five steps is that of the third.
            assert "its loss reached 0.01 at step 101 (target 0.01)" in over["message"]
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


class SlowToJoin(Fleet):
    """After `slow` is set, new workers start, and do not come as far as `shoal.torch.init`."""

    is_slow = False

    def start(self, worker: WorkerSpec) -> None:
        if self.is_slow:
            self.running[worker.worker] = worker
        else:
            super().start(worker)


def test_a_target_that_returns_to_the_present_workers_ends_the_preparation(tmp_path: Path) -> None:
    """2 -> 4 -> 2 commits no generation: the next resize replaces nothing, and prepares from its own beginning."""

    async def story() -> None:
        async with server(tmp_path, 4, policy="max-min", fleet=SlowToJoin(4)) as here:
            superseded, runner = here.loop.metrics.superseded._value, here.loop.elastic
            job = await submit(here, "first", perfect, "2..4")
            other = await submit(here, "other", perfect, "2")
            both: dict[int, Curve] = {job: perfect}
            await settle(here, both, lambda: here.state(job) == "running" and here.state(other) == "running")
            here.fleet.is_slow = True
            before = superseded.get()
            await here.post(f"/jobs/{other}/cancel")
            await here.until(lambda: here.loop.jobs[job].target_gpus == 4 and here.gpus(job) == 4)
            assert job in runner._aimed_s
            await submit(here, "another", perfect, "2")
            await here.until(lambda: here.loop.jobs[job].target_gpus == 2)
            await here.until(lambda: superseded.get() == before + 1)
            assert job not in runner._aimed_s, "no generation follows"

    run(story())
