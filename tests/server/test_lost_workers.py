"""Workers that are lost soon after they joined: new ones wait longer each time, and a loop without progress ends."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.server.fakes import Here, run, server

from shoal.server.loop import coordinator_events, restarts


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarts, "FIRST_S", 0.01)
    monkeypatch.setattr(restarts, "LONGEST_S", 0.02)


def active(here: Here, job: int) -> list[str]:
    live = here.loop.jobs.get(job)
    return [] if live is None else [w.id for w in live.workers.values() if w.state == "active"]


async def lose_last(here: Here, job: int, workers: int, *, steps: int = 0) -> None:
    """Wait until the job trains with so many workers and has done so many new steps, and kill its last one."""
    live = here.loop.jobs[job]
    before = live.furthest_step + steps
    await here.until(
        lambda: (
            here.state(job) == "failed"
            or (len(active(here, job)) == workers and live.furthest_step >= before)
        ),
        train=(job,),
    )
    if here.state(job) != "failed":
        last = active(here, job)[-1]
        here.fleet._ended(last, None, "SIGSEGV", False)
        await here.until(lambda: f"worker {last} " in live.last_loss)


def test_a_job_goes_on_with_fewer_workers_while_its_new_ones_are_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restarts, "FIRST_S", 200.0)

    async def story() -> None:
        async with server(tmp_path, 2, policy="max-min") as here:
            job = (await here.submit("1..2", max_restarts=0))["id"]
            await lose_last(here, job, 2)
            await lose_last(here, job, 2)  # the first was replaced at once
            live = here.loop.jobs[job]
            assert live.grows_s is not None
            why = await here.get(f"/jobs/{job}/why")
            assert why["reason"]["code"] == "CoolDown"
            assert "2 workers in a row were lost soon after they started" in why["sentence"]
            assert "SIGSEGV" in why["sentence"]
            other = (await here.submit("1"))["id"]
            await here.until(lambda: here.state(other) == "running", train=(job,))
            assert (live.life.restarts, here.state(job), live.target_gpus) == (0, "running", 1)
            here.fleet.end(f"{other}.0")
            here.loop.restarts.end_rest(live)  # as if the time had passed
            await here.until(lambda: len(active(here, job)) == 2, train=(job,))

    run(story())


def test_new_workers_wait_longer_each_time_and_the_job_that_completes_steps_does_not_end(
    tmp_path: Path, fast: None
) -> None:
    async def story() -> None:
        async with server(tmp_path, 2, policy="max-min") as here:
            job = (await here.submit("1..2", max_restarts=0))["id"]
            for number in range(1, 2 * restarts.MAX_VAIN_LOSSES):
                await lose_last(here, job, 2, steps=1)
                assert here.loop.jobs[job].losses == number
            assert (here.loop.jobs[job].life.restarts, here.state(job)) == (0, "running")

    run(story())


def test_a_worker_that_has_worked_for_a_while_is_replaced_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinator_events, "STEADY_S", 0.0)
    monkeypatch.setattr(restarts, "FIRST_S", 200.0)

    async def story() -> None:
        async with server(tmp_path, 2, policy="max-min") as here:
            job = (await here.submit("1..2"))["id"]
            for _ in range(5):
                await lose_last(here, job, 2, steps=1)
            await here.until(lambda: len(active(here, job)) == 2, train=(job,))
            assert here.loop.jobs[job].losses == 1

    run(story())


def test_a_job_that_cannot_be_smaller_restarts_as_a_whole_and_ends_at_its_limit(
    tmp_path: Path, fast: None
) -> None:
    async def story() -> None:
        async with server(tmp_path, 2, policy="max-min") as here:
            job = (await here.submit("2..2", resize="live", max_restarts=1))["id"]
            for _ in range(2 * restarts.MAX_LOSSES):
                await lose_last(here, job, 2, steps=1)
            await here.until(lambda: here.state(job) == "failed", train=(job,))
            shown = await here.get(f"/jobs/{job}")
            assert shown["restarts"] == 1
            assert "3 workers in a row were lost soon after they started" in shown["message"]
            assert "SIGSEGV" in shown["message"]
            assert here.loop.devices.used == 0

    run(story())


def test_without_a_limit_of_its_owner_a_job_restarts_as_long_as_it_completes_new_steps(
    tmp_path: Path, fast: None
) -> None:
    async def story() -> None:
        async with server(tmp_path, 1, policy="max-min") as here:
            job = (await here.submit("1..1", resize="live"))["id"]
            for _ in range(restarts.LOST_RESTARTS + 3):
                await lose_last(here, job, 1, steps=1)
            assert here.loop.jobs[job].life.restarts > restarts.LOST_RESTARTS
            for _ in range(restarts.LOST_RESTARTS):
                await lose_last(here, job, 1)
            await here.until(lambda: here.state(job) == "failed")
            assert "SIGSEGV" in (await here.get(f"/jobs/{job}"))["message"]

    run(story())


def test_the_signal_is_told_also_if_the_closed_connection_was_noticed_first(
    tmp_path: Path, fast: None
) -> None:
    async def story() -> None:
        async with server(tmp_path, 1, policy="max-min") as here:
            job = (await here.submit("1..1", resize="live", max_restarts=0))["id"]
            await here.until(lambda: len(active(here, job)) == 1, train=(job,))
            (worker,) = active(here, job)
            here.fleet.stubborn = True
            here.fleet.live[worker].end()
            here.loop.elastic.service.jobs[str(job)].exited(worker, "its connection closed")
            live = here.loop.jobs[job]
            await here.until(lambda: live.ending is not None)
            assert "its connection closed" in live.ending
            here.fleet._ended(worker, None, "SIGSEGV", True)
            await here.until(lambda: here.state(job) == "failed")
            message = (await here.get(f"/jobs/{job}"))["message"]
            assert message == f"all its workers were lost, the last so: worker {worker} was ended by SIGSEGV"

    run(story())


def test_losses_without_a_step_in_between_end_every_job(tmp_path: Path, fast: None) -> None:
    async def story() -> None:
        async with server(tmp_path, 2, policy="max-min") as here:
            job = (await here.submit("1..2", max_restarts=0))["id"]
            await here.until(lambda: here.loop.jobs[job].furthest_step >= 1, train=(job,))
            here.loop.jobs[job].furthest_step = 10**6  # nothing that it does from now on is new
            for _ in range(restarts.MAX_VAIN_LOSSES):
                await lose_last(here, job, 2)
            await here.until(lambda: here.state(job) == "failed", train=(job,))
            assert "SIGSEGV" in (await here.get(f"/jobs/{job}"))["message"]

    run(story())
