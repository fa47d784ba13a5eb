"""A job at its limit can move: an old worker and the new one that takes its place count once."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.server.fakes import Fleet, Here, run, server

from shoal.executors.base import NodeInfo

TWO = (NodeInfo("n0", 2, "v100", True), NodeInfo("n1", 2, "v100", True))


async def limited(here: Here, **limits: object) -> None:
    await here.add_user("ada")
    await here.call("PATCH", "/users/ada", json={"limits": limits}, status=200)


def nodes_of(here: Here, job: int) -> list[str]:
    return sorted(w.node for w in here.loop.jobs[job].workers.values())


@pytest.mark.parametrize("limits", [{"max_gpus": 2}, {"max_gpus_of_type": {"v100": 2}}])
def test_a_live_job_at_its_limit_leaves_a_drained_node(tmp_path: Path, limits: dict[str, object]) -> None:
    async def story() -> None:
        async with server(tmp_path, TWO, policy="max-min") as here:
            await limited(here, **limits)
            job = (await here.submit("1..4", user="ada"))["id"]
            await here.until(lambda: here.gpus(job) == 2 and here.state(job) == "running", train=(job,))
            (before,) = set(nodes_of(here, job))
            (other,) = {"n0", "n1"} - {before}
            await here.post(f"/nodes/{before}/drain")
            await here.until(lambda: nodes_of(here, job) == [other, other], train=(job,))
            await here.until(lambda: here.loop.jobs[job].size == 2, train=(job,))
            live = here.loop.jobs[job]
            assert (live.life.restarts, here.state(job)) == (0, "running")
            assert here.loop.devices.used == 2

    run(story())


def test_a_job_above_a_lowered_limit_can_move_while_it_shrinks(tmp_path: Path) -> None:
    async def story() -> None:
        async with server(tmp_path, TWO, policy="max-min") as here:
            await limited(here, max_gpus=2)
            job = (await here.submit("1..4", user="ada"))["id"]
            await here.until(lambda: here.gpus(job) == 2 and here.state(job) == "running", train=(job,))
            (before,) = set(nodes_of(here, job))
            (other,) = {"n0", "n1"} - {before}
            await here.post(f"/nodes/{before}/drain")
            await here.call("PATCH", "/users/ada", json={"limits": {"max_gpus": 1}}, status=200)
            await here.until(lambda: nodes_of(here, job) == [other], train=(job,))

    run(story())


def test_a_place_never_has_three_workers(tmp_path: Path) -> None:
    """The target goes to and fro while a new worker that is no longer wanted does not end."""

    async def story() -> None:
        fleet = Fleet(TWO)
        async with server(tmp_path, fleet=fleet, policy="max-min") as here:
            await limited(here, max_gpus=1)
            job = (await here.submit("1..1", resize="live", user="ada"))["id"]
            await here.until(lambda: here.gpus(job) == 1 and here.state(job) == "running", train=(job,))
            (old,) = here.loop.jobs[job].workers.values()
            (other,) = {"n0", "n1"} - {old.node}
            fleet.stubborn = fleet.lingers = True
            await here.post(f"/nodes/{old.node}/drain")
            await here.until(lambda: here.gpus(job) == 2)
            await here.post(f"/nodes/{old.node}/uncordon")
            await here.post(f"/nodes/{other}/drain")
            await here.until(
                lambda: "leaving" in {w.state for w in here.loop.jobs[job].workers.values()}, train=(job,)
            )
            await here.post(f"/nodes/{other}/uncordon")
            await here.post(f"/nodes/{old.node}/drain")
            await here.until(lambda: job in here.loop.unmet, train=(job,))
            assert here.gpus(job) == 2
            why = await here.get(f"/jobs/{job}/why")
            assert why["reason"]["code"] == "WaitingForRelease"
            assert "it is to move to other GPUs and waits until" in why["sentence"]
            fleet.stubborn = fleet.lingers = False
            for worker in list(here.loop.jobs[job].workers.values()):
                if worker.state == "leaving":
                    fleet.end(worker.id)
            await here.until(lambda: nodes_of(here, job) == [other], train=(job,))

    run(story())


def test_a_straggler_is_replaced_at_the_limit_and_counts_once_with_its_replacement(tmp_path: Path) -> None:
    async def story() -> None:
        async with server(tmp_path, 3, policy="max-min") as here:
            await limited(here, max_gpus=2)
            job = (await here.submit("2..2", resize="live", replace_stragglers=True, user="ada"))["id"]
            await here.until(lambda: here.state(job) == "running")
            here.fleet.slow[f"{job}.1"] = 3.0
            live = here.loop.jobs[job]
            await here.until(lambda: f"{job}.2" in live.workers, train=(job,))
            assert live.workers[f"{job}.2"].replaces == f"{job}.1"
            await here.until(lambda: live.workers.keys() == {f"{job}.0", f"{job}.2"}, train=(job,))

    run(story())
