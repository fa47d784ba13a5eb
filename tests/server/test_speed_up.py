"""The speed-up of a job while it is resized: of the workers that train, or not known, and never nothing."""

from __future__ import annotations

from pathlib import Path

from tests.server.fakes import run, server


def test_the_speed_up_of_a_job_that_is_resized_is_never_zero(tmp_path: Path) -> None:
    async def story() -> None:
        async with server(tmp_path, 4, policy="max-min") as here:
            job = (await here.submit("1..4"))["id"]
            await here.until(lambda: here.gpus(job) == 4 and here.state(job) == "running", train=(job,))
            live, seen = here.loop.jobs[job], set()

            def at_size(gpus: int) -> bool:
                seen.add((live.gpus != live.size, here.loop.profiles.speedup(live)[0]))
                return bool(live.size == live.gpus == gpus)

            other = (await here.submit("2"))["id"]
            await here.until(lambda: at_size(2), train=(job,))
            for rank in range(2):
                here.fleet.end(f"{other}.{rank}")
            await here.until(lambda: at_size(4), train=(job,))
            assert any(resizes for resizes, _ in seen)
            assert all(speed_up is None or speed_up >= 1.0 for _, speed_up in seen), seen

    run(story())
