"""What the engine's driver sees of agents and nodes, and jobs that wait for machines of the engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

from shoal.agents.fleet_records import Agent, Link
from shoal.agents.fleet_state import FleetState
from shoal.agents.main import versions
from shoal.agents.reaching import Reaching
from shoal.agents.shared import Sharing
from shoal.cli.node import _row
from shoal.executors.base import NodeInfo, NodeLeaving
from shoal.server.api.models import NodeStatus
from shoal.server.engine.cluster_view import ClusterView
from shoal.wire.agent_messages import NodeFacts

from .fakes import Fleet, Here, run, server


class Agents:
    """The agents of some nodes of a fleet: the real rules, without connections."""

    address = "127.0.0.1:1"
    executor: SimpleNamespace

    def __init__(self, fleet: Fleet, *names: str) -> None:
        self._fleet, self._state = fleet, FleetState("epoch")
        for name in names:
            facts = NodeFacts(name, 2, "virtual", True)
            self._state.agents[name] = Agent(name, "1", (facts,), Link.CONNECTED, 0.0)

    def known(self) -> Mapping[str, Agent]:
        return self._state.agents

    def leaving(self, agent: str, in_s: float, why: str) -> None:
        self._tell(self._state.leaving(agent, in_s, why, 0.0))

    def stays(self, agent: str) -> None:
        self._tell(self._state.stays(agent))

    def _tell(self, effects: list[object]) -> None:
        for effect in effects:
            assert isinstance(effect, NodeLeaving)
            self._fleet.on_node(effect)

    def fenced(self, agent: str, why: str) -> None:
        raise AssertionError

    def make_token(self, lifetime_s: float) -> tuple[str, str]:
        raise AssertionError

    def drop_token(self, token_id: str) -> None:
        raise AssertionError


def view_of(here: Here, *names: str) -> ClusterView:
    return ClusterView(here.loop, Agents(here.fleet, *names))


NODES = (NodeInfo("a", 2, "virtual", True), NodeInfo("b", 2, "virtual", True))


def test_a_drained_node_is_seen_as_blocked_and_one_that_the_driver_keeps_off_is_not(tmp_path: Path) -> None:
    async def story() -> None:
        async with server(tmp_path, NODES) as here:
            view = view_of(here, "a", "b")
            await here.post("/nodes/a/drain")
            view.keep_off({"b": "it is being returned"})
            seen = view.agents()
            assert (seen["a"].blocked, seen["a"].drained) == ("somebody drained it", True)
            assert (seen["b"].blocked, seen["b"].drained) == ("", False), "a job may want it back"
            await here.post("/nodes/a/uncordon")
            assert (view.agents()["a"].blocked, view.agents()["a"].drained) == ("", False)

    run(story())


def test_a_node_that_stays_after_all_is_used_again(tmp_path: Path) -> None:
    async def story() -> None:
        async with server(tmp_path, NODES[:1]) as here:
            view = view_of(here, "a")
            view.leaving("a", 100.0, "its time limit")
            job = (await here.submit("2"))["id"]
            await here.until(lambda: here.loop.decided_s is not None)
            assert not here.fleet.running
            seen = view.agents()["a"]
            assert seen.blocked == "its time limit"
            assert seen.leaves_in_s is not None
            assert 90 < seen.leaves_in_s <= 100
            view.stays("a")
            await here.until(lambda: here.gpus(job) == 2)
            assert view.agents()["a"].leaves_in_s is None
            events = [e["type"] for e in (await here.get("/events"))["items"]]
            assert "node.stays" in events

    run(story())


@dataclass
class Services:
    """What agents answered to the probes."""

    unreachable: dict[str, dict[str, str]]
    reaching: Reaching = field(default_factory=Reaching)

    def sharing(self, agent: str) -> Sharing | None:
        return Sharing(False, "it cannot read /shared: permission denied") if agent == "b" else Sharing(True)


def test_node_ls_shows_what_is_wrong_with_a_machine(tmp_path: Path) -> None:
    async def story() -> None:
        shared = tmp_path / "shared"
        shared.mkdir()
        async with server(tmp_path / "home", NODES, shared=str(shared)) as here:
            agents = Agents(here.fleet, "a", "b")
            agents.executor = SimpleNamespace(
                services=Services({}), state=SimpleNamespace(agents=agents.known())
            )
            agents.known()["a"].versions = versions()
            agents.known()["a"].wall_offset_s = 86400.0
            agents.known()["b"].versions = {k: v for k, v in versions().items() if k != "torch"}
            here.control.machines = agents
            items = {n["name"]: n["warnings"] for n in (await here.get("/nodes"))["items"]}
            assert items["a"] == ["its clock is 1 day ahead of the server's"]
            assert items["b"] == [
                "its Python has no torch: jobs that use shoal.torch fail there",
                f"it does not share {here.control.home.states} (it cannot read /shared: permission denied): "
                "the state of its jobs goes through the control plane",
            ]
            assert (await here.get("/nodes/a"))["warnings"] == items["a"]
            row = " ".join(_row(NodeStatus(**(await here.get("/nodes"))["items"][0])))
            assert "its clock is 1 day ahead" in row, "`shoal node ls` shows it"
            here.control.machines = None

    run(story())


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
