"""What follows the training in a script is part of the job: if it fails in a worker, the job has failed."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.server.fakes import FakeLive, Here, run, server


async def trained(here: Here, **spec: object) -> tuple[int, list[FakeLive]]:
    """A job whose two workers have just done their last step, and what follows it is still to come."""
    here.fleet.lingers = True
    job = (await here.submit("2", resize="live", **spec))["id"]
    await here.until(lambda: here.loop.jobs[job].furthest_step >= 1, train=(job,))
    crew = here.fleet.crew(job)
    for worker in crew:
        worker.member.finish()
        worker.say()
    await here.until(lambda: here.loop.jobs[job].ending is not None)
    return job, crew


async def message(here: Here, job: int) -> str:
    await here.until(lambda: here.state(job) in ("succeeded", "failed"))
    found = await here.get(f"/jobs/{job}")
    return f"{found['state']}: {found['message']}"


@pytest.mark.parametrize(("first", "second"), [(0, 1), (1, 0), (1, 1)])
def test_a_job_fails_if_a_worker_ends_with_an_error_after_the_training(
    tmp_path: Path, first: int, second: int
) -> None:
    async def story() -> None:
        async with server(tmp_path, 2) as here:
            job, crew = await trained(here, max_restarts=0)
            for worker, code in zip(crew, (first, second)):
                here.fleet.end(worker.id, code)
            text = await message(here, job)
            assert text.startswith("failed: its training was done, then worker "), text
            assert text.endswith("ended with exit code 1")

    run(story())


def test_the_error_of_the_script_is_told(tmp_path: Path) -> None:
    async def story() -> None:
        async with server(tmp_path, 2) as here:
            job, crew = await trained(here, max_restarts=0)
            crew[0].member.fail("Traceback ...\nOSError: No space left on device")
            crew[0].say()
            here.fleet.end(crew[1].id, 0)
            failed = (
                f"its training was done, then worker {crew[0].id} failed: OSError: No space left on device"
            )
            await here.until(lambda: here.loop.jobs[job].ending == failed)
            here.fleet.end(crew[0].id, 1)
            assert await message(here, job) == f"failed: {failed}"

    run(story())


def test_a_job_is_done_if_its_workers_end_well_or_are_killed_after_the_training(tmp_path: Path) -> None:
    async def story() -> None:
        async with server(tmp_path, 2) as here:
            job, crew = await trained(here, max_restarts=0)
            here.fleet.end(crew[0].id, 0)
            here.fleet.end(crew[1].id, None, "SIGKILL")
            assert (await message(here, job)).startswith("succeeded")

    run(story())


def test_a_job_that_may_restart_does_so_if_what_follows_its_training_fails(tmp_path: Path) -> None:
    async def story() -> None:
        async with server(tmp_path, 2) as here:
            job, crew = await trained(here, max_restarts=1)
            for worker in crew:
                here.fleet.end(worker.id, 1)
            await here.until(lambda: here.loop.jobs[job].life.restarts == 1)

    run(story())
