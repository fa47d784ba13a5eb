"""What jobs take of their GPU: measured while they run, learned from those that ended, known of the next."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from shoal.executors.base import GpuUsage, NodeInfo
from shoal.knowledge.unknown import Unknown
from shoal.server.loop.usage import Samples
from shoal.server.services.needs import predict

from .fakes import Fleet, Here, run, server
from .test_sharing import Shared

REAL = (NodeInfo("local", 1, "v100", False, ("uuid",), gpu_memory_mb=16_000.0),)


async def one_run(here: Here, command: list[str], *samples: GpuUsage, **spec: Any) -> dict[str, Any]:
    """A job from start to end, with what was seen of its GPU meanwhile; what it is known to have used."""
    job = (await here.submit("1", command=command, **spec))["id"]
    await here.until(lambda: here.gpus(job) == 1)
    for sample in samples:
        here.loop.usage.take({("local", 0): sample}, here.loop.now_s())
    here.fleet.end(f"{job}.0")
    await here.until(lambda: here.state(job) == "succeeded")
    found: dict[str, Any] = here.control.store.job(job)["progress"]["used"]
    return found


def test_figures_and_phases_of_a_job_from_what_was_seen_every_few_seconds() -> None:
    seen = Samples(first_s=105.0)
    for at_s, percent in [(105, 0), (110, 10), (115, 80), (120, 60), (125, 5)]:
        seen.add(GpuUsage(percent, 1000 + percent), at_s)
    found = seen.labels(100.0, 128.0)
    assert found["gpu_util"] == pytest.approx(31.0)
    assert found["gpu_util_std"] == pytest.approx(math.sqrt((0 + 100 + 6400 + 3600 + 25) / 5 - 31**2))
    assert found["gpu_mem_mb"] == 1080
    assert (found["pre_s"], found["post_s"], found["total_s"]) == (15.0, 8.0, 28.0)
    idle = Samples(first_s=100.0)
    idle.add(GpuUsage(0.0, 50.0), 100.0)
    assert "pre_s" not in idle.labels(100.0, 128.0), "it never used it, so there is no first time"


def test_the_next_job_of_the_same_command_is_known_by_the_last_and_may_share(tmp_path: Path) -> None:
    async def story() -> None:
        async with server(tmp_path, fleet=Shared(REAL), share=True) as here:
            train = ["python", "train.py", "--lr=1"]
            await one_run(here, train, GpuUsage(20, 3000), GpuUsage(40, 5000))
            used = await one_run(here, train, GpuUsage(50, 4000), GpuUsage(50, 4000))
            assert (used["gpu_util"], used["gpu_mem_mb"]) == (50.0, 4000.0)
            host, guest = [(await here.submit("1", command=train))["id"] for _ in range(2)]
            await here.until(lambda: here.state(guest) == "running")
            assert here.loop.jobs[guest].host == host
            needs = (await here.get(f"/jobs/{guest}"))["needs"]
            assert (needs["gpu_util"], needs["gpu_mem_mb"]) == (40.0, 5000.0), "the mean, and the most"
            assert needs["basis"] == "2 finished jobs of the same command"
            told = (await here.get(f"/jobs/{guest}/why"))["reason"]["evidence"]
            assert told["needs_by"] == needs["basis"]
            given = await here.submit("1", command=train, needs={"gpu_util": 90})
            assert (given["needs"]["gpu_util"], given["needs"]["gpu_mem_mb"]) == (90.0, 5000.0)
            assert given["needs"]["basis"] == "what its owner gave, else 2 finished jobs of the same command"

    run(story())


def test_only_who_had_a_gpu_to_itself_from_start_to_end_teaches(tmp_path: Path) -> None:
    async def story() -> None:
        async with server(tmp_path, fleet=Shared(REAL), share=True) as here:
            seen = GpuUsage(50, 4000)
            assert await one_run(here, ["a"], seen, seen) is not None
            assert await one_run(here, ["a"], seen) is None, "once is not enough"
            assert await one_run(here, ["a"], GpuUsage(math.nan, 1), GpuUsage(1, math.inf)) is None
            host = (await here.submit("1", command=["b"], needs={"gpu_mem_mb": 100, "gpu_util": 10}))["id"]
            await here.until(lambda: here.gpus(host) == 1)
            guest = (await here.submit("1", command=["b"], needs={"gpu_mem_mb": 100, "gpu_util": 10}))["id"]
            await here.until(lambda: here.state(guest) == "running")
            for _ in range(3):
                here.loop.usage.take({("local", 0): seen}, here.loop.now_s())
            for job in (host, guest):
                here.fleet.end(f"{job}.0")
                await here.until(lambda job=job: here.state(job) == "succeeded")
                row = here.control.store.job(job)
                assert row["progress"]["used"] is None
                assert row["progress"]["shared"]

    run(story())


def test_with_ten_finished_jobs_a_forest_tells_by_their_flags_and_unknown_flags_are_unknown() -> None:
    taught = [
        (
            ["python", "train.py", f"--batch={b}"],
            {"gpu_mem_mb": 1000.0 * b, "gpu_util": 5.0 * b, "pre_s": 3.0},
        )
        for b in (1, 2, 4, 8)
        for _ in range(5)
    ]
    found = predict(["python", "train.py", "--batch=8"], taught)
    assert not isinstance(found, Unknown)
    needs, how = found
    assert needs["gpu_mem_mb"] == 8192, "what it needs at least, in whole 1024 MB: never less"
    assert 20 < needs["gpu_util"] <= 40
    assert "20 finished jobs of the same program" in how
    few = predict(["python", "train.py", "--batch=8"], taught[:9])
    assert isinstance(few, Unknown)
    assert "9 jobs" in few.why
    new = predict(["python", "train.py", "--batch=8", "--deep"], taught)
    assert isinstance(new, Unknown)
    assert "deep was never seen" in new.why


@pytest.mark.parametrize(
    "needs",
    [
        {"gpu_mem_mb": -1},
        {"gpu_mem_mb": 0},
        {"gpu_util": 101},
        {"gpu_util": -1},
        {"pre_s": 1e300},
        {"gpu": 1},
        7,
    ],
)
def test_needs_that_no_job_can_have_are_refused_in_a_sentence(tmp_path: Path, needs: Any) -> None:
    async def story() -> None:
        async with server(tmp_path, 1) as here:
            body = {"command": ["x"], "needs": needs}
            reply = await here.post("/jobs", json=body, status=422)
            assert "needs" in reply["error"]["message"]

    run(story())


def test_a_driver_that_fails_once_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Moody(Fleet):
        answers = iter([OSError("busy"), RuntimeError("driver"), {("local", 0): GpuUsage(50, 4000)}])

        def usage(self) -> dict[tuple[str, int], GpuUsage]:
            answer = next(self.answers, {("local", 0): GpuUsage(50, 4000)})
            if isinstance(answer, Exception):
                raise answer
            return answer

    async def story() -> None:
        async with server(tmp_path, fleet=Moody(REAL)) as here:
            job = (await here.submit("1"))["id"]
            await here.until(lambda: here.state(job) == "running")
            usage = here.loop.usage
            await here.until(lambda: job in usage._samples and usage._samples[job].memory_mb == 4000)

    monkeypatch.setattr("shoal.server.loop.usage.SAMPLE_S", 0.01)
    run(story())
