"""The control plane may be killed at any moment: nothing acknowledged is lost, workers are taken over again."""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from shoal.executors.keeper import start_time

from .fakes import Fleet, Here, run, server

FINAL = ("succeeded", "failed", "cancelled")


def test_a_job_that_is_resumed_before_the_next_server_could_make_it_stand_still_runs_on(
    tmp_path: Path,
) -> None:
    fleet = Fleet(1)

    async def story() -> None:
        async with server(tmp_path, fleet=fleet, kill=True) as here:
            job = (await here.submit("1"))["id"]
            await here.until(lambda: here.state(job) == "running")
            fleet.deaf = True
            await here.post(f"/jobs/{job}/pause")
        fleet.deaf = False
        async with server(tmp_path, fleet=fleet) as here:
            await here.post(f"/jobs/{job}/resume")
            await here.until(lambda: here.state(job) == "running")
            assert fleet.started == [f"{job}.0"]
            here.fleet.end(f"{job}.0")
            await here.until(lambda: here.state(job) == "succeeded")

    run(story())


async def some_doings(here: Here, rng: random.Random, acknowledged: dict[int, str], ended: set[int]) -> None:
    """Users and workers do things; what was answered is noted."""
    for _ in range(rng.randint(1, 12)):
        live = list(here.loop.jobs.values())
        what = rng.choice(["submit", "submit", "step", "end", "cancel", "pause", "resume", "wait"])
        job = rng.choice(live) if live else None
        if what == "submit":
            gpus = rng.choice(["1", "2", "3", "1..4", "2..3"])
            resize = rng.choice([None, "restart"]) if ".." not in gpus else None
            made = await here.submit(gpus, resize=resize, expected_s=rng.choice([None, 5.0, 500.0]))
            acknowledged[made["id"]] = gpus
        elif what == "end" and job is not None and job.resize.value != "live" and job.workers:
            if not job.ending and job.life.state.value == "running":
                ended.add(job.id)
                for worker in list(job.workers):
                    here.fleet.end(worker)
        elif what == "step":
            for j in live:
                here.fleet.step(j.id)
        elif what in ("cancel", "pause", "resume") and job is not None:
            reply = await here.http.post(
                f"/api/v1/jobs/{job.id}/{what}", headers={"Authorization": f"Bearer {here.tokens['admin']}"}
            )
            assert reply.status_code in (200, 409), reply.text
        for _ in range(rng.randint(0, 3)):
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("seed", range(8))
def test_killed_at_random_moments_under_load_it_loses_nothing_and_ends_clean(
    tmp_path: Path, seed: int
) -> None:
    rng = random.Random(seed)
    fleet = Fleet(4)
    acknowledged: dict[int, str] = {}
    ended: set[int] = set()

    async def story() -> None:
        policy = rng.choice(["max-min", "srtf", "afs-l"])
        for _ in range(6):
            fleet.deaf = False
            async with server(tmp_path, fleet=fleet, policy=policy, kill=True) as here:
                assert {j["id"] for j in here.control.store.jobs(limit=1000)} >= set(acknowledged)
                await some_doings(here, rng, acknowledged, ended)
                # Some of what is on record by now will not be done any more.
                fleet.deaf = rng.random() < 0.5
                for _ in range(rng.randint(0, 2)):
                    await asyncio.sleep(0)
        fleet.deaf = False
        async with server(tmp_path, fleet=fleet, policy=policy) as here:
            await finish(here, acknowledged)

    async def finish(here: Here, acknowledged: dict[int, str]) -> None:
        for job in list(here.loop.jobs.values()):
            if job.life.state.value == "paused":
                await here.post(f"/jobs/{job.id}/resume")
        for _ in range(3000):
            here.check()
            for job in list(here.loop.jobs.values()):
                if job.resize.value == "live":
                    here.fleet.step(job.id, total=3)
                elif job.workers and job.life.state.value == "running" and not job.ending:
                    for worker in list(job.workers):
                        if worker in here.fleet.running and worker not in here.fleet.suspended:
                            here.fleet.end(worker)
            await asyncio.sleep(0.002)
            if not here.loop.jobs:
                break
        assert not here.loop.jobs, {j.id: (j.life, j.target, j.workers) for j in here.loop.jobs.values()}
        # The last end is known before it is on record.
        await here.until(lambda: all(j["state"] in FINAL for j in here.control.store.jobs(limit=1000)))
        rows = {j["id"]: j for j in here.control.store.jobs(limit=1000)}
        assert set(rows) == set(acknowledged)
        assert "failed" not in {r["state"] for r in rows.values()}, [
            (r["id"], r["message"]) for r in rows.values() if r["state"] == "failed"
        ]
        assert fleet.running == {}
        assert here.loop.devices.used == 0
        assert here.control.store.unended_workers() == []
        events = here.control.store.events(limit=100_000)
        assert [e["id"] for e in events] == list(range(1, len(events) + 1))
        for job_id in acknowledged:
            types = [e["type"] for e in events if e["job"] == job_id]
            assert types.count("job.submitted") == 1
            assert sum(t in (f"job.{f}" for f in FINAL) for t in types) == 1, "it ends once"

    run(story())


class RealServer:
    """A server process of its own."""

    def __init__(self, home: Path, *options: str) -> None:
        self.home, self.options = home, options
        self.up()

    def up(self) -> None:
        log = (self.home.parent / "serve.log").open("ab")
        command = [sys.executable, "-m", "shoal.server.serve", "--home", str(self.home), *self.options]
        self.process = subprocess.Popen(command, stdout=log, stderr=log)
        deadline = time.monotonic() + 180
        while True:
            try:
                found = json.loads((self.home / "server.json").read_text())
                if found["pid"] == self.process.pid:
                    break
            except (OSError, ValueError):
                pass
            assert self.process.poll() is None, (self.home.parent / "serve.log").read_text()[-2000:]
            assert time.monotonic() < deadline
            time.sleep(0.05)
        token = (self.home / "admin.token").read_text().strip()
        headers = {"Authorization": f"Bearer {token}"}
        self.http = httpx.Client(base_url=found["address"] + "/api/v1", headers=headers, timeout=30)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def down(self) -> None:
        self.http.post("/shutdown", json={"jobs": "stop"})
        assert self.process.wait(60) == 0

    def submit(self, *command: str, **spec: Any) -> Any:
        reply = self.http.post("/jobs", json={"command": list(command), "workdir": "/tmp", **spec})
        assert reply.status_code == 201, reply.text
        return reply.json()

    def job(self, job: int) -> Any:
        return self.http.get(f"/jobs/{job}").json()

    def until(self, job: int, *states: str, timeout_s: float = 60) -> Any:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            found = self.job(job)
            if found["state"] in states:
                return found
            time.sleep(0.05)
        raise AssertionError((states, found))


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made = RealServer(tmp_path_factory.mktemp("real") / "home", "--gpus", "3", "--policy", "fifo")
    yield made
    if made.process.poll() is None:
        made.down()


def test_processes_outlive_a_killed_server_and_are_taken_over_not_restarted(
    real: RealServer, tmp_path: Path
) -> None:
    # Two run on while no server is there: one until told, one to its end; a third waits for its GPUs.
    go = tmp_path / "go"
    script = 'echo begin; while [ ! -e "$0" ]; do sleep 0.05; done; echo "end $RANK"'
    long = real.submit("sh", "-c", script, str(go), gpus="2", per_gpu=True)["id"]
    short = real.submit("sh", "-c", "echo short; exit 7")["id"]
    waits = real.submit("sh", "-c", "echo late", gpus="3")["id"]
    workers = real.until(long, "running")["workers"]
    while any(w["pid"] is None for w in workers):
        workers = real.job(long)["workers"]
    before = {w["pid"]: start_time(w["pid"]) for w in workers}
    real.kill()
    assert {pid: start_time(pid) for pid in before} == before, "they run on"
    real.up()
    after = real.until(long, "running")["workers"]
    assert {w["pid"]: start_time(w["pid"]) for w in after} == before, "they are the same processes"
    assert real.until(short, "failed")["exit_code"] == 7
    # Killed again; one ends while no one is there to see it.
    real.kill()
    go.touch()
    while any(start_time(pid) is not None for pid in before):
        time.sleep(0.02)
    real.up()
    assert real.until(long, "succeeded")["exit_code"] == 0
    assert real.until(waits, "succeeded")["message"] is None
    lines = real.http.get(f"/jobs/{long}/logs").json()["items"]
    assert sorted((line["rank"], line["text"]) for line in lines) == [
        (0, "begin"), (0, "end 0"), (1, "begin"), (1, "end 1"),
    ]  # fmt: skip
    with real.http.stream("GET", f"/jobs/{long}/logs/stream") as stream:
        told = [line for line in stream.iter_lines() if line.startswith("event: ")]
    assert told == ["event: line"] * 4 + ["event: end"]
    # Events go on from where a reader was cut off, over all the restarts.
    with real.http.stream("GET", "/events/stream", headers={"Last-Event-ID": "3"}) as stream:
        ids = []
        for line in stream.iter_lines():
            if line.startswith("id: "):
                ids.append(int(line[4:]))
                if len(ids) == 20:
                    break
    assert ids == list(range(4, 24))


def states_of_session(sid: int) -> list[str]:
    command = ["ps", "-o", "stat=", "-s", str(sid)]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.split()


def test_shutting_down_leaves_no_process_and_a_stopped_job_begins_again(real: RealServer) -> None:
    job = real.submit("sh", "-c", "trap '' TERM; sleep 1000 & sleep 1000", grace_s=0.3)["id"]
    pid = None
    while pid is None:
        pid = real.until(job, "running")["workers"][0]["pid"]
    real.down()
    assert start_time(pid) is None
    assert states_of_session(pid) == []
    real.up()
    assert real.until(job, "running")["id"] == job
    real.http.post(f"/jobs/{job}/cancel", json={"grace_s": 0})
    real.until(job, "cancelled")


def test_shutting_down_ends_a_job_that_stopped_its_keeper_and_hid_a_child(
    real: RealServer, tmp_path: Path
) -> None:
    """The child has neither the environment nor the session by which it could be found, and outlives its parent."""
    script = """
        trap '' TERM
        kill -STOP $PPID
        (env -i setsid sh -c 'trap "" TERM; echo $$ >> "$0"; while true; do sleep 1; done' "$0" &)
        echo $$ $PPID >> "$0"
        while true; do sleep 1; done
    """
    file = tmp_path / "pids"
    job = real.submit("sh", "-c", script, str(file), grace_s=0.3)["id"]
    real.until(job, "running")
    pids: list[int] = []
    while len(pids) < 3:
        time.sleep(0.02)
        pids = [int(pid) for pid in file.read_text().split()] if file.exists() else []
    assert None not in map(start_time, pids), "the job, its keeper and the child"
    real.down()
    assert [start_time(pid) for pid in pids] == [None] * 3
    real.up()
    real.http.post(f"/jobs/{job}/cancel", json={"grace_s": 0})
    real.until(job, "cancelled")


def test_a_server_whose_home_is_removed_ends_with_all_its_processes(tmp_path: Path) -> None:
    made = RealServer(tmp_path / "home", "--gpus", "1")
    try:
        job = made.submit("sh", "-c", "sleep 1000 & sleep 1000", grace_s=0.3)["id"]
        pid = None
        while pid is None:
            pid = made.until(job, "running")["workers"][0]["pid"]
        shutil.rmtree(made.home)
        assert made.process.wait(60) == 0
        assert states_of_session(pid) == []
    finally:
        made.kill()


def test_a_second_server_on_the_same_home_refuses_in_one_line(real: RealServer) -> None:
    command = [sys.executable, "-m", "shoal.server.serve", "--home", str(real.home)]
    second = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert second.returncode == 5
    assert "is in use by process" in second.stderr
    assert len(second.stderr.strip().splitlines()) == 1
    port = real.http.base_url.port
    other = [*command[:-1], str(real.home) + "-2", "--port", str(port)]
    third = subprocess.run(other, capture_output=True, text=True, check=False, timeout=60)
    assert third.returncode == 9
    assert "choose another --port" in third.stderr


def test_a_stopped_and_a_killed_worker_are_told_apart(real: RealServer) -> None:
    job = real.submit("sleep", "1000")["id"]
    pid = None
    while pid is None:
        pid = real.until(job, "running")["workers"][0]["pid"]
    os.kill(pid, signal.SIGKILL)
    found = real.until(job, "failed")
    assert found["signal"] == "SIGKILL"
    assert found["message"] == f"worker {job}.0 was ended by SIGKILL"
