"""Crash loops end: restarts are counted, wait longer each time, leave the GPUs to others, and stop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shoal.executors.base import WorkerSpec
from shoal.server.loop import elastic_runner, restarts
from shoal.server.loop.live_job import LiveJob
from shoal.server.loop.restarts import rest_s
from shoal.server.loop.shutdown import stop_jobs

from .fakes import Fleet, Here, run, server


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarts, "FIRST_S", 0.01)


def test_rests_double_up_to_minutes_and_differ_between_jobs() -> None:
    for failures in range(1, 20):
        full_s = min(2.0 ** (failures - 1), 300.0)
        assert all(0.5 * full_s <= rest_s(job, failures) <= full_s for job in range(50))
        assert len({rest_s(job, failures) for job in range(50)}) > 40


async def _in_step(here: Here, job: int, workers: int) -> list[Any]:
    """The job trains with so many workers: return them."""

    def trains() -> bool:
        live = here.loop.jobs[job]
        active = [w for w in live.workers.values() if w.state == "active"]
        return len(active) == workers and live.life.state.value == "running"

    await here.until(trains, train=(job,))
    return here.fleet.crew(job)


def test_when_all_workers_die_in_the_same_step_again_and_again_the_job_ends(
    tmp_path: Path, fast: None
) -> None:
    async def story() -> None:
        async with server(tmp_path) as here:
            job = (await here.submit("2..2", resize="live", max_restarts=2))["id"]
            for _ in range(3):
                # One after the other: the replacement of the first has started when the second dies.
                for worker in await _in_step(here, job, 2):
                    before = len(here.fleet.started)
                    here.fleet._ended(worker.id, None, "SIGSEGV", False)
                    await here.until(lambda b=before: len(here.fleet.started) > b or not here.fleet.crew(job))
            await here.until(lambda: here.state(job) == "failed")
            shown = await here.get(f"/jobs/{job}")
            assert shown["restarts"] == 2
            assert "SIGSEGV" in shown["message"]
            assert "started again 2 times" in shown["message"]
            assert here.fleet.running == {}
            assert here.loop.devices.used == 0

    run(story())


def test_a_job_that_rests_leaves_its_gpus_to_others_and_says_when_it_goes_on(tmp_path: Path) -> None:
    async def story() -> None:
        async with server(tmp_path, 1) as here:
            first = (await here.submit("1", max_restarts=5))["id"]
            await here.until(lambda: here.state(first) == "running")
            second = (await here.submit("1"))["id"]
            here.fleet.end(f"{first}.0", 7)
            await here.until(lambda: here.state(second) == "running")
            why = await here.get(f"/jobs/{first}/why")
            assert why["reason"]["code"] == "CoolDown"
            assert "exit code 7" in why["sentence"]
            assert why["could"] == []
            assert f"{first}.1" not in here.fleet.started
            here.fleet.end(f"{second}.0")
            await here.until(lambda: here.state(first) == "running")

    run(story())


def test_a_rest_outlives_the_server_and_ends_when_the_owner_resumes_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restarts, "FIRST_S", 200.0)

    async def story() -> None:
        fleet = Fleet(1)
        async with server(tmp_path, fleet=fleet, kill=True) as here:
            job = (await here.submit("1", max_restarts=5))["id"]
            await here.until(lambda: here.state(job) == "running")
            here.fleet.end(f"{job}.0", 7)
            await here.until(lambda: here.loop.jobs[job].again_s is not None and not here.loop.outbox)
        fleet = Fleet(1)
        async with server(tmp_path, fleet=fleet) as here:
            await here.until(lambda: here.loop.decided_s is not None)
            assert (await here.get(f"/jobs/{job}/why"))["reason"]["code"] == "CoolDown"
            assert fleet.started == []
            await here.post(f"/jobs/{job}/pause")
            await here.post(f"/jobs/{job}/resume")
            await here.until(lambda: here.state(job) == "running")

    run(story())


@pytest.mark.parametrize("gpus", ["2", "1..2"])
def test_a_worker_that_cannot_be_started_is_tried_again_and_not_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: str, fast: None
) -> None:
    monkeypatch.setattr(restarts, "LONGEST_S", 0.02)

    async def story() -> None:
        fleet = Fleet(2)
        fleet.broken = "cannot start it: No space left on device"
        async with server(tmp_path, fleet=fleet) as here:
            job = (await here.submit(gpus))["id"]
            await here.until(lambda: here.state(job) == "failed")
            shown = await here.get(f"/jobs/{job}")
            assert shown["restarts"] == 0, "nothing of it has run"
            assert "No space left" in shown["message"]
            assert here.loop.devices.used == 0
            fleet.broken = None
            other = (await here.submit(gpus))["id"]
            await here.until(lambda: here.state(other) == "running")

    run(story())


@pytest.mark.parametrize("gpus", ["2", "1..2"])
def test_a_fault_in_the_start_of_one_worker_hinders_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: str, fast: None
) -> None:
    """All of them begin in the same turn, after one transaction."""
    monkeypatch.setattr(restarts, "LONGEST_S", 0.02)

    async def story() -> None:
        fleet = Fleet(6)
        starts, rightly = [], fleet.start

        def start(worker: WorkerSpec) -> None:
            starts.append(worker.worker)
            if len(starts) == 1:
                raise RuntimeError("a fault in the program")
            rightly(worker)

        monkeypatch.setattr(fleet, "start", start)
        async with server(tmp_path, fleet=fleet) as here:
            jobs = [(await here.submit(gpus, resize="live"))["id"] for _ in range(3)]
            await here.until(lambda: all(here.state(job) == "running" for job in jobs))
            ended = (await here.get("/events?type=worker.ended"))["items"]
            assert [event["data"]["worker"] for event in ended] == [starts[0]]
            assert "cannot start it: a fault in the program" in ended[0]["message"]

    run(story())


def test_a_fault_with_one_job_hinders_neither_the_others_nor_the_end_of_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        async with server(tmp_path) as here:
            first = (await here.submit("1..1", resize="live"))["id"]
            await here.until(lambda: here.state(first) == "running", train=(first,))
            rightly = here.loop.elastic.reconcile

            def reconcile(job: LiveJob) -> None:
                if job.id == first:
                    raise RuntimeError("a fault in the program")
                rightly(job)

            monkeypatch.setattr(here.loop.elastic, "reconcile", reconcile)
            here.loop.reconciler.reconcile_next(first)
            other = (await here.submit("1..1", resize="live"))["id"]
            await here.until(lambda: here.state(other) == "running", train=(first, other))
            # Its directory could not be prepared when the server started, for example.
            here.loop.elastic.service.remove(str(first))
            (tmp_path / "jobs" / str(first) / "secret").unlink()
            monkeypatch.setattr(here.loop.elastic._keys, "secret", lambda *_: 1 / 0)
            here.loop.elastic.ask_checkpoint(here.loop.jobs[first])
            await stop_jobs(here.loop.jobs, here.loop.runners, here.fleet, here.loop.outbox)
            assert not here.fleet.running

    run(story())


def test_a_worker_killed_when_it_starts_is_a_lost_worker_and_not_the_fault_of_the_script(
    tmp_path: Path, fast: None
) -> None:
    async def story() -> None:
        async with server(tmp_path) as here:
            job = (await here.submit("1..2", name="newborn"))["id"]
            await here.until(lambda: len(here.fleet.running) == 2)
            for worker in list(here.fleet.running):
                here.fleet._ended(worker, None, "SIGKILL", False)
            await here.until(lambda: here.state(job) == "running")
            assert (await here.get(f"/jobs/{job}"))["restarts"] <= 1

    run(story())


def test_a_live_job_whose_workers_were_all_stopped_shows_running_when_its_new_workers_train(
    tmp_path: Path, fast: None
) -> None:
    async def story() -> None:
        fleet = Fleet(4)
        async with server(tmp_path, fleet=fleet) as here:
            job = (await here.submit("2..2", resize="live"))["id"]
            old = await _in_step(here, job, 2)
            fleet.stubborn = True  # stopped processes do not end by themselves
            for worker in old:
                here.loop.elastic.service.jobs[str(job)].exited(worker.id, "no sign of life for 6.0 s")
            await here.until(lambda: here.loop.jobs[job].life.restarts == 1)
            await here.until(lambda: len([w for w in fleet.crew(job) if w not in old]) == 2)
            await here.until(lambda: here.state(job) == "running", train=(job,))

    run(story())


def test_a_job_that_restarts_to_grow_rests_in_between(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        async with server(tmp_path, 4, policy="max-min") as here:
            other = (await here.submit("2"))["id"]
            job = (await here.submit("1..4", resize="restart"))["id"]
            await here.until(lambda: here.gpus(job) == 2)
            started = list(here.fleet.started)
            for rank in range(2):
                here.fleet.end(f"{other}.{rank}")
            await here.until(lambda: here.loop.jobs[job].target_gpus == 4)
            why = await here.get(f"/jobs/{job}/why")
            assert why["reason"]["code"] == "CoolDown"
            assert "4 GPUs" in why["sentence"]
            assert here.fleet.started == started
            here.loop.jobs[job].began_s -= restarts.RESIZE_REST_S
            here.loop.soon(here.loop.jobs[job])
            await here.until(lambda: here.gpus(job) == 4)

    run(story())


def test_a_worker_that_has_left_is_killed_soon_though_its_grace_period_is_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert elastic_runner.LEFT_S <= 1.0, "a GPU is to be free within 2 s, whatever the grace period is"
    monkeypatch.setattr(elastic_runner, "LEFT_S", 0.05)

    async def story() -> None:
        fleet = Fleet(2)
        async with server(tmp_path, fleet=fleet, policy="max-min") as here:
            job = (await here.submit("1..2", grace_s=3600))["id"]
            await _in_step(here, job, 2)
            fleet.lingers = True
            other = (await here.submit("1"))["id"]
            await here.until(lambda: here.state(other) == "running", train=(job,))

    run(story())


def test_a_fixed_job_whose_first_rank_has_ended_does_not_speak_of_new_workers(tmp_path: Path) -> None:
    async def story() -> None:
        async with server(tmp_path) as here:
            job = (await here.submit("2"))["id"]
            await here.until(lambda: here.state(job) == "running")
            here.fleet.end(f"{job}.0")
            await here.until(lambda: here.gpus(job) == 1)
            sentence = (await here.get(f"/jobs/{job}/why"))["sentence"]
            assert "its work on 1 GPU is done; it ends with its other 1 process" in sentence

    run(story())
