"""Where live jobs go: the placements of the simulator, on a cluster of several nodes."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from shoal.core.errors import ShoalError
from shoal.executors.base import NodeInfo
from shoal.placement.keep_and_pack import KeepAndPack
from shoal.placement.optimus_placer import OptimusPlacer
from shoal.server.control import Control
from shoal.server.options import Options

from .fakes import Fleet, Here, run, server

TWO = (NodeInfo("a", 2, "gpu", True), NodeInfo("b", 2, "gpu", True))


@contextlib.asynccontextmanager
async def placed(home: Path, placement: str, policy: str = "max-min") -> AsyncIterator[Here]:
    async with server(home, fleet=Fleet(TWO), policy=policy, placement=placement) as here:
        yield here


async def over(here: Here, job: int) -> None:
    here.fleet.end(next(w for w in here.fleet.running if w.startswith(f"{job}.")))
    await here.until(lambda: here.state(job) == "succeeded")


@pytest.mark.parametrize(("placement", "moves"), [("auto", False), ("moving", True)])
def test_a_spread_job_moves_together_when_there_is_room_if_the_placement_is_one_that_moves(
    tmp_path: Path, placement: str, moves: bool
) -> None:
    async def story() -> None:
        async with placed(tmp_path, placement) as here:
            for nodes, step_s in ((1, 0.05), (2, 0.2)):
                here.loop.profiles.estimator("net").observe(2, nodes, "gpu", step_s)
            left, right, third = [(await here.submit("1", name=n))["id"] for n in ("left", "right", "third")]
            await here.until(lambda: here.gpus(left) == here.gpus(right) == here.gpus(third) == 1)
            assert [here.loop.jobs[j].target for j in (left, right, third)] == [{0: 1}, {0: 1}, {1: 1}]
            await over(here, left)
            pair = (await here.submit("2", resize="live", model="net", name="pair"))["id"]
            await here.until(lambda: here.state(pair) == "running")
            assert len(here.loop.jobs[pair].target) == 2, "one GPU is free on each node"
            await over(here, right)
            await here.until(
                lambda: len({w.node for w in here.loop.jobs[pair].workers.values()}) == (1 if moves else 2),
                train=(pair,),
            )
            assert len(here.loop.jobs[pair].target) == (1 if moves else 2)

    run(story())


@pytest.mark.parametrize("taught", [True, False])
def test_a_spread_job_moves_only_if_its_model_was_measured_on_one_node_and_was_faster_there(
    tmp_path: Path, taught: bool
) -> None:
    """The speeds come from the steps that workers report, as they do in a live cluster."""

    async def story() -> None:
        async with placed(tmp_path, "moving") as here:
            jobs, profiles = here.loop.jobs, here.loop.profiles

            def nodes_of(job: int) -> set[str]:
                return {w.node for w in jobs[job].workers.values()}

            def seconds(nodes: int) -> float:
                return 1 / profiles.profile(jobs[pair]).speed("gpu", 2, nodes)

            if taught:
                first = (await here.submit("2", resize="live", model="net", name="first"))["id"]
                here.fleet.curves[first] = lambda workers: 0.2
                await here.until(lambda: here.state(first) == "running")
                await here.until(lambda: profiles.learner(jobs[first]).is_measured(2, "gpu"), train=(first,))
                here.fleet.step(first, total=1)
                await here.until(lambda: here.state(first) == "succeeded")
            left, right, third = [(await here.submit("1", name=n))["id"] for n in ("left", "right", "third")]
            await here.until(lambda: here.gpus(left) == here.gpus(right) == here.gpus(third) == 1)
            await over(here, left)
            pair = (await here.submit("2", resize="live", model="net", name="pair"))["id"]
            here.fleet.curves[pair] = lambda workers: 0.8 if len(nodes_of(pair)) == 2 else 0.2
            await here.until(lambda: here.state(pair) == "running")
            assert len(nodes_of(pair)) == 2
            await here.until(lambda: seconds(2) == pytest.approx(0.8), train=(pair,))
            assert seconds(1) == pytest.approx(0.2 if taught else 0.8), (
                "what is not known is no reason to move"
            )
            plans, step = here.loop.scheduler.plans, jobs[pair].progress.step
            await over(here, right)
            await here.until(
                lambda: here.loop.scheduler.plans > plans and jobs[pair].progress.step > step + 20,
                train=(pair,),
            )
            if taught:
                await here.until(lambda: len(nodes_of(pair)) == 1, train=(pair,))
                await here.until(lambda: jobs[pair].progress.speed == pytest.approx(5.0), train=(pair,))
            assert len(jobs[pair].target) == (1 if taught else 2)
            assert jobs[pair].life.restarts == 0

    run(story())


def test_a_job_that_cannot_go_on_elsewhere_is_left_where_it_is(tmp_path: Path) -> None:
    async def story() -> None:
        async with placed(tmp_path, "moving") as here:
            fixed = (await here.submit("1", name="fixed"))["id"]
            live = (await here.submit("1", name="live", resize="live"))["id"]
            may_move = here.loop.scheduler.placer.inner.may_move
            assert [may_move(fixed), may_move(live)] == [False, True]

    run(story())


def test_the_policy_of_optimus_has_its_own_placement_and_another_placement_may_be_asked_for(
    tmp_path: Path,
) -> None:
    async def story() -> None:
        async with placed(tmp_path / "auto", "auto") as here:
            assert type(here.loop.scheduler.placer.inner) is KeepAndPack
            await here.call("PUT", "/policy", json={"name": "optimus"})
            assert type(here.loop.scheduler.placer.inner) is OptimusPlacer
        with pytest.raises(ShoalError, match="there is no placement"):
            Control(Options(tmp_path / "wrong", placement="nowhere"), executor=Fleet(TWO))

    run(story())


FOUR = tuple(NodeInfo(f"n{i}", 2, "gpu", True, rack=f"rack{i // 2}") for i in range(4))


@pytest.mark.parametrize(
    "placement",
    ["liquid", "liquid-batch", "liquid-batch:max_plans=300:seed=4", "node-or-whole-nodes", "optimus"],
)
def test_jobs_that_start_together_are_placed_by_any_placement_and_stay_there_over_a_kill(
    tmp_path: Path, placement: str
) -> None:
    async def story() -> None:
        fleet = Fleet(FOUR)
        async with server(tmp_path, fleet=fleet, policy="fifo", placement=placement, kill=True) as here:
            first = (await here.submit("8", name="first"))["id"]
            await here.until(lambda: here.state(first) == "running")
            sizes = ("2", "1", "2", "1", "2", "2")  # eight GPUs, and two that have to wait
            jobs = [(await here.submit(gpus))["id"] for gpus in sizes]
            plan = await here.post("/plan", json={"spec": {"command": ["x"], "gpus": "1"}})
            assert plan["verdict"] == "waits"
            for worker in list(fleet.running):  # all at one decision
                fleet.end(worker)
            await here.until(lambda: sum(here.gpus(j) for j in jobs) >= 6)
            here.check()
            at = {j: here.loop.jobs[j].target for j in jobs}
            assert all(sum(target.values()) in (0, int(gpus)) for target, gpus in zip(at.values(), sizes))
            taken = [sum(target.get(node, 0) for target in at.values()) for node in range(4)]
            assert max(taken) <= 2
            assert "reason" in await here.get(f"/jobs/{jobs[-1]}/why")
        async with server(tmp_path, fleet=fleet, policy="fifo", placement=placement) as here:
            await here.until(lambda: sum(here.gpus(j) for j in jobs) >= 6)
            assert {j: here.loop.jobs[j].target for j in jobs} == at
            assert fleet.told == []

    run(story())
