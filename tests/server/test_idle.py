"""Jobs that hold GPUs without using them: named, and shrunk or paused if the operator asks for it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.server.fakes import Here, run, server

from shoal.executors.base import GpuUsage
from shoal.executors.cpu_time import cpu_seconds
from shoal.executors.keeper import start_time
from shoal.server.loop import idle

BUSY, IDLE = GpuUsage(80.0, 1000.0), GpuUsage(0.0, 1000.0)


def look(here: Here, used: dict[int, GpuUsage] | None = None, cpu_s: dict[str, float] | None = None) -> None:
    here.loop.idle.take({("local", gpu): usage for gpu, usage in (used or {}).items()}, cpu_s or {})


def pass_by(here: Here, seconds: float) -> None:
    """Let so much time pass for the idle jobs."""
    for seen in here.loop.idle._seen.values():
        seen.busy_s -= seconds
        seen.looked_s -= seconds


@pytest.fixture(autouse=True)
def never_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idle, "LOOK_S", 1e6)


async def of(here: Here, job: int) -> Any:
    return (await here.get(f"/jobs/{job}"))["idle_s"]


def test_a_job_that_does_not_use_its_gpus_is_named_everywhere(tmp_path: Path) -> None:
    async def story() -> None:
        async with server(tmp_path, 4) as here:
            sleeps, works = [(await here.submit("1", name=name))["id"] for name in ("sleeps", "works")]
            await here.until(lambda: here.gpus(sleeps) == here.gpus(works) == 1)
            gpus = {
                job: next(iter(here.loop.jobs[job].workers.values())).device[1] for job in (sleeps, works)
            }
            now = {gpus[sleeps]: IDLE, gpus[works]: BUSY}
            look(here, now)
            pass_by(here, 601)
            look(here, now)
            assert (await of(here, sleeps)) > 600
            assert (await of(here, works)) is None
            (share,) = (await here.get("/shares"))["items"]
            assert (share["gpus"], share["unused_gpus"]) == (2, 1)
            metrics = await here.get("/metrics")
            assert 'shoal_unused_gpus{user="admin"} 1.0' in metrics
            assert f'shoal_job_idle_seconds{{job="{sleeps}",user="admin"}}' in metrics
            assert "sleeps" not in metrics, "no token is needed to read them"
            await here.until(lambda: not here.loop.outbox)
            (event,) = (await here.get(f"/events?job={sleeps}&type=job.idle"))["items"]
            assert event["message"] == "it has held 1 GPU for 10 min without using it"
            look(here, dict.fromkeys(now, BUSY))
            assert (await of(here, sleeps)) is None

    run(story())


def test_steps_and_cpu_time_count_where_the_use_of_a_gpu_is_not_known(tmp_path: Path) -> None:
    async def story() -> None:
        async with server(tmp_path, 8, policy="afs-p") as here:
            live = (await here.submit("1..2"))["id"]
            plain, unknown = [(await here.submit("1"))["id"] for _ in range(2)]
            jobs = (live, plain, unknown)
            await here.until(lambda: all(here.state(job) == "running" for job in jobs), train=(live,))
            workers = [w for job in (live, plain) for w in here.loop.jobs[job].workers]
            look(here, cpu_s=dict.fromkeys(workers, 5.0))
            pass_by(here, 601)
            here.loop.jobs[live].progress.step = 17_000
            look(here, cpu_s=dict.fromkeys(workers, 5.0))
            assert [await of(here, job) is not None for job in jobs] == [False, True, False]
            pass_by(here, 601)
            look(here, cpu_s=dict.fromkeys(workers, 500.0))
            assert [await of(here, job) is not None for job in jobs] == [False, False, False]

    run(story())


def test_a_process_with_several_gpus_is_idle_only_while_all_of_them_are(tmp_path: Path) -> None:
    async def story() -> None:
        async with server(tmp_path, 4, idle_action="pause") as here:
            job = (await here.submit("4", per_gpu=False))["id"]
            await here.until(lambda: here.gpus(job) == 4)
            (worker,) = here.loop.jobs[job].workers.values()
            assert len(worker.devices) == 4
            first_idle = {gpu: IDLE if gpu == worker.device[1] else BUSY for gpu in range(4)}
            some_unknown = {worker.device[1]: IDLE}
            for used in (first_idle, some_unknown):
                look(here, used)
                pass_by(here, 601)
                look(here, used)
                assert await of(here, job) is None
            look(here, dict.fromkeys(range(4), IDLE))
            pass_by(here, 601)
            look(here, dict.fromkeys(range(4), IDLE))
            await here.until(lambda: here.state(job) == "paused")

    run(story())


def test_an_idle_job_shrinks_to_its_minimum_and_grows_when_it_works(tmp_path: Path) -> None:
    async def story() -> None:
        async with server(tmp_path, 4, policy="afs-p", idle_action="shrink") as here:
            job = (await here.submit("1..4"))["id"]
            await here.until(lambda: here.gpus(job) == 4 and here.state(job) == "running", train=(job,))
            for _ in range(2):
                look(here, dict.fromkeys(range(4), IDLE))
                here.loop.jobs[job].progress.step = 5
                pass_by(here, 601)
            look(here, dict.fromkeys(range(4), IDLE))
            await here.until(lambda: here.gpus(job) == 1, train=(job,))
            reason = (await here.get(f"/jobs/{job}"))["reason"]
            assert "without using them, so it has its minimum" in reason["sentence"]
            look(here, dict.fromkeys(range(4), BUSY))
            await here.until(lambda: here.gpus(job) == 4, train=(job,))

    run(story())


def test_an_idle_job_is_paused_and_its_owner_told(tmp_path: Path) -> None:
    async def story() -> None:
        async with server(tmp_path, 4, idle_action="pause") as here:
            job = (await here.submit("1"))["id"]
            await here.until(lambda: here.gpus(job) == 1)
            look(here, dict.fromkeys(range(4), IDLE))
            pass_by(here, 601)
            look(here, dict.fromkeys(range(4), IDLE))
            await here.until(lambda: here.state(job) == "paused" and here.gpus(job) == 0)
            shown = await here.get(f"/jobs/{job}")
            assert shown["message"] == "paused: it has held 1 GPU for 10 min without using it"
            await here.post(f"/jobs/{job}/resume")
            await here.until(lambda: here.gpus(job) == 1)

    run(story())


def test_the_rule_is_remembered(tmp_path: Path) -> None:
    async def story() -> None:
        async with server(tmp_path, idle_action="pause", idle_after_s=60.0) as here:
            assert here.loop.idle.rule == idle.IdleRule(60.0, "pause")
        async with server(tmp_path) as here:
            assert here.loop.idle.rule == idle.IdleRule(60.0, "pause")

    run(story())


def test_the_cpu_time_of_a_worker_includes_its_children(tmp_path: Path) -> None:
    loop = "import time\nwhile time.process_time() < 0.3: pass\nprint('done', flush=True)\ninput()"
    outer = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {loop!r}])"
    with subprocess.Popen(
        [sys.executable, "-c", outer], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == b"done\n"
        began = start_time(process.pid)
        line = f'{{"pid": {process.pid}, "start_time": {began}, "keeper_pid": 1, "keeper_start_time": 1}}'
        (tmp_path / "started").write_text(line)
        (tmp_path / "other").mkdir()
        (tmp_path / "other" / "started").write_text(line.replace(str(began), "1"))
        found = cpu_seconds({"1.0": tmp_path, "2.0": tmp_path / "other", "3.0": tmp_path / "none"})
        process.stdin.close()
    assert found.keys() == {"1.0"}
    tick_s = 1 / os.sysconf("SC_CLK_TCK")
    assert found["1.0"] >= 0.3 - 2 * tick_s, "the kernel rounds user and system time down to a tick"
