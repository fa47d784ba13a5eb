"""Jobs that need more GPUs than there are now, while an engine could provide them."""

from __future__ import annotations

from pathlib import Path

from shoal.executors.base import NodeInfo

from .fakes import Fleet, run, server


def test_a_job_waits_for_machines_to_come_and_starts_when_they_have_joined(tmp_path: Path) -> None:
    async def story() -> None:
        fleet = Fleet((NodeInfo("a", 2, "a100", True),))
        async with server(tmp_path, fleet=fleet) as here:
            body = {"command": ["train"], "gpus": "4", "gpu_types": ["a100"]}
            refused = await here.post("/jobs", json=body, status=422)
            assert refused["error"]["code"] == "infeasible"
            here.loop.expect_gpus({"a100": 2, "v100": 4})
            job = (await here.post("/jobs", json=body, status=201))["id"]
            other = (await here.post("/jobs", json=body | {"gpu_types": ["v100"]}, status=201))["id"]
            await here.until(lambda: here.loop.decided_s is not None)
            assert not fleet.running
            assert (await here.get(f"/jobs/{job}/why"))["reason"]["sentence"]
            assert (await here.get("/status"))["total_gpus"] == 2, "machines to come are not counted"
            fleet.join(NodeInfo("b", 2, "a100", True))
            here.loop.expect_gpus({"v100": 4})
            await here.until(lambda: here.gpus(job) == 4)
            assert {w.node for w in fleet.running.values()} == {"a", "b"}
            assert here.gpus(other) == 0
            fleet.join(NodeInfo("c", 4, "v100", True))
            await here.until(lambda: here.gpus(other) == 4)

    run(story())


def test_a_restarted_server_knows_what_jobs_wait_for(tmp_path: Path) -> None:
    async def story() -> None:
        fleet = Fleet((NodeInfo("a", 2, "a100", True),))
        async with server(tmp_path, fleet=fleet) as here:
            here.loop.expect_gpus({"a100": 2})
            await here.submit("4")
        async with server(tmp_path, fleet=fleet) as here:
            (job,) = here.loop.jobs
            fleet.join(NodeInfo("b", 2, "a100", True))
            await here.until(lambda: here.gpus(job) == 4)

    run(story())
