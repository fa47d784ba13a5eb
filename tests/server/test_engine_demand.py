"""Which jobs want more machines, and how many GPUs."""

from __future__ import annotations

from pathlib import Path

from shoal.engines.capacity import Demand
from shoal.server.engine.demand import demand_of

from .fakes import run, server


def test_waiting_jobs_come_first_then_jobs_that_would_be_faster(tmp_path: Path) -> None:
    async def story() -> None:
        async with server(tmp_path, 4, policy="max-min") as here:
            assert demand_of(here.loop, 99) == []
            grows = (await here.submit("1..16", name="grows"))["id"]
            await here.until(lambda: here.gpus(grows) == 4)
            assert demand_of(here.loop, 99) == [Demand(12)], "the cluster is its limit, not its range"
            assert demand_of(here.loop, 8) == [Demand(4)], "no more than 8 can be provided"
            for _ in range(4):
                await here.submit("1", resize="never")
            waits = (await here.submit("2", resize="never"))["id"]
            await here.until(lambda: here.loop.jobs[waits].life.state == "pending", train=(grows,))
            await here.until(lambda: here.loop.jobs[grows].target_gpus < 4, train=(grows,))
            wanted = demand_of(here.loop, 99)
            assert wanted[0].gpus <= 2
            assert wanted[-1].gpus >= 12, "the job that runs is last"
            held = (await here.submit("4", resize="never"))["id"]
            await here.until(lambda: Demand(4) in demand_of(here.loop, 99), train=(grows,))
            await here.post(f"/jobs/{held}/pause")
            await here.until(lambda: Demand(4) not in demand_of(here.loop, 99), train=(grows,))

    run(story())


def test_a_job_that_does_not_gain_or_cannot_be_served_wants_nothing(tmp_path: Path) -> None:
    async def story() -> None:
        async with server(tmp_path, 4, policy="afs-l") as here:
            job = (await here.submit("1..16"))["id"]
            await here.until(lambda: here.gpus(job) == 4, train=(job,))
            live = here.loop.jobs[job]
            live.gpu_type = "virtual"
            assert demand_of(here.loop, 99) == [Demand(12)]
            for gpus, step_s in ((1, 1.0), (2, 0.5), (3, 0.5001), (4, 0.51)):
                for _ in range(30):
                    here.loop.profiles.measured(live, gpus, 1, step_s)
            await here.until(lambda: demand_of(here.loop, 99) == [], train=(job,))
            fixed = (await here.submit("4", resize="never"))["id"]
            await here.until(lambda: fixed in here.loop.scheduler.jobs, train=(job,))
            assert all(d.gpus <= 4 for d in demand_of(here.loop, 99))
            assert Demand(4) not in demand_of(here.loop, 3), (
                "it needs 4, and 3 are the most that can be provided"
            )

    run(story())
