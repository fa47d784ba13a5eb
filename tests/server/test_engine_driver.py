"""The engine's driver against an engine in memory: what it requests, returns, drains and says."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from shoal.core.errors import ShoalError
from shoal.engines.base import (
    AgentCommand,
    EngineUnavailable,
    Machine,
    MachineRequest,
    MachineState,
    NewMachine,
    RequestRefused,
)
from shoal.engines.capacity import Demand
from shoal.server.engine.driver import EngineDriver
from shoal.server.engine.port import AgentSeen
from shoal.server.engine.settings import EngineSettings, settings_from
from shoal.server.engine.tokens import MachineTokens
from shoal.server.engine.view import DriverView

PENDING, UP, LEAVING, GONE = (
    MachineState.PENDING,
    MachineState.UP,
    MachineState.LEAVING,
    MachineState.GONE,
)


class MemoryEngine:
    title, id_word = "Slurm", "job"
    clock_ahead_s: float | None = None

    def __init__(self) -> None:
        self.machines: dict[str, Machine] = {}
        self.commands: dict[str, AgentCommand] = {}
        self.asked: list[tuple[MachineRequest, int]] = []
        self.avoided: set[str] = set()
        self.refusal = ""
        self.down = False
        self.last = 4710
        self.closed = self.detached = False

    def _answer(self) -> None:
        if self.down:
            raise EngineUnavailable("Slurm does not answer")

    async def version(self) -> str:
        self._answer()
        return "22.05.8"

    async def offers(self, *, drained: Collection[str] = ()) -> list[NewMachine]:
        self._answer()
        return [NewMachine(4), NewMachine(4, "a100")]

    async def check(self, what: MachineRequest) -> None:
        self._answer()

    async def request(
        self,
        what: MachineRequest,
        commands: Sequence[AgentCommand],
        *,
        avoid: Collection[str] = (),
        drained: Collection[str] = (),
    ) -> list[Machine]:
        self._answer()
        self.asked.append((what, len(commands)))
        self.avoided = set(avoid)
        if self.refusal:
            raise RequestRefused(self.refusal)
        made = []
        for command in commands:
            self.last += 1
            names = (f"slurm-{n}" for n in range(1, 99))
            taken = {m.agent for m in self.machines.values()} | set(avoid) | set(drained)
            agent = next(n for n in names if n not in taken)
            machine = Machine(str(self.last), agent, PENDING, gpus=what.gpus or 0, reason="Priority")
            self.machines[machine.id] = machine
            self.commands[machine.id] = command
            made.append(replace(machine, state=MachineState.REQUESTED))
        return made

    async def release(self, machine_id: str) -> None:
        self._answer()
        self.set(machine_id, state=GONE, reason="CANCELLED", fenced=True)

    async def poll(self) -> list[Machine]:
        self._answer()
        found = list(self.machines.values())
        self.machines = {m.id: m for m in found if m.state is not GONE}
        return found

    async def detach(self) -> None:
        self.detached = True

    async def close(self) -> None:
        self.closed, self.machines = True, {}

    def set(self, machine_id: str, **fields: Any) -> None:
        self.machines[machine_id] = replace(self.machines[machine_id], **fields)


@dataclass
class Port:
    address: str = "10.0.0.1:7070"
    seen: dict[str, AgentSeen] = field(default_factory=dict)
    wanted: list[Demand] = field(default_factory=list)
    held: dict[str, str] = field(default_factory=dict)
    leaves: dict[str, float] = field(default_factory=dict)
    dead: list[str] = field(default_factory=list)
    tokens: set[str] = field(default_factory=set)
    made: int = 0
    events: list[tuple[str, str]] = field(default_factory=list)
    to_come: dict[str, int] = field(default_factory=dict)

    def agents(self) -> Mapping[str, AgentSeen]:
        return self.seen

    def demand(self, most_gpus: int) -> Sequence[Demand]:
        return self.wanted

    def expect(self, most_gpus: Mapping[str, int]) -> None:
        self.to_come = dict(most_gpus)

    def keep_off(self, agents: Mapping[str, str]) -> None:
        self.held = dict(agents)

    def leaving(self, agent: str, in_s: float, why: str) -> None:
        self.leaves[agent] = in_s
        self._set(agent, leaves_in_s=in_s, blocked=why)

    def stays(self, agent: str) -> None:
        self.leaves.pop(agent, None)
        self._set(agent, leaves_in_s=None, blocked="")

    def _set(self, agent: str, **fields: Any) -> None:
        if agent in self.seen:
            self.seen[agent] = replace(self.seen[agent], **fields)

    def fenced(self, agent: str, why: str) -> None:
        self.dead.append(agent)
        drained = agent in self.seen and self.seen[agent].drained
        self.seen[agent] = AgentSeen(agent, connected=False, may_have_workers=False, drained=drained)

    def make_token(self, lifetime_s: float) -> tuple[str, str]:
        self.made += 1
        self.tokens.add(f"id{self.made}")
        return f"id{self.made}", f"secret{self.made}"

    def drop_token(self, token_id: str) -> None:
        self.tokens.discard(token_id)

    def record(self, type: str, message: str, **data: object) -> None:
        self.events.append((type, message))


class World:
    """A driver that can be replaced, as after `kill -9`, with a clock that only the test moves."""

    def __init__(self, low: int = 0, high: int = 4, idle_s: float = 60.0) -> None:
        self.engine, self.port, self.now_s = MemoryEngine(), Port(), 1000.0
        self.saved: dict[str, Any] = {}
        self.settings = EngineSettings("slurm", (low, high), idle_s)
        self.boot()

    def boot(self) -> None:
        def command(token: str) -> AgentCommand:
            return AgentCommand(("agent",), files={"token": token.encode()})

        tokens = MachineTokens(self.saved or None, self.saved.update)
        self.driver = EngineDriver(self.engine, self.settings, self.port, tokens, command, lambda: self.now_s)
        self.view = DriverView(self.driver)

    def run(self, seconds: float = 2.0) -> None:
        async def main() -> None:
            end_s = self.now_s + seconds
            while self.now_s < end_s:
                self.now_s += 0.5
                await self.driver.tick(self.now_s)

        asyncio.run(main())

    def join(self, *ids: str, used: int = 0) -> None:
        """The engine starts the machines, and their agents connect."""
        for i in ids or list(self.engine.machines):
            self.engine.set(i, state=UP, node=f"g{i}", reason="")
            agent = self.engine.machines[i].agent
            self.port.seen[agent] = AgentSeen(agent, True, bool(used), 4, used)
        self.run()

    def use(self, agent: str, used: int, workers: bool | None = None) -> None:
        has = bool(used) if workers is None else workers
        self.port.seen[agent] = replace(self.port.seen[agent], used_gpus=used, may_have_workers=has)

    def drain(self, agent: str, drained: bool = True) -> None:
        why = "somebody drained it" if drained else ""
        self.port.seen[agent] = replace(self.port.seen[agent], blocked=why, drained=drained)


def test_a_waiting_job_gets_a_machine_and_the_reason_quotes_the_engine() -> None:
    world = World()
    world.run()
    assert world.engine.asked == []
    world.port.wanted = [Demand(6)]
    world.run()
    assert world.engine.asked == [(MachineRequest(4), 2)]
    assert world.view.coming() == (
        "2 machines requested from Slurm; job 4711 is pending there (Priority), job 4712 is pending there (Priority)"
    )
    assert {c.files["token"] for c in world.engine.commands.values()} == {b"secret1", b"secret2"}
    world.run(30)
    assert len(world.engine.asked) == 1, "what is coming is not requested again"
    world.join()
    world.port.wanted = []
    world.use("slurm-1", 4)
    assert world.view.coming() is None
    assert world.port.held == {}


def test_an_idle_machine_is_kept_from_jobs_before_it_is_returned() -> None:
    world = World(idle_s=10.0)
    world.port.wanted = [Demand(8)]
    world.run()
    world.port.wanted = []
    world.join()
    world.use("slurm-1", 4)
    world.run(7)
    assert world.port.held == {}
    seen_held = False
    for _ in range(40):
        world.run(0.5)
        seen_held = seen_held or ("slurm-2" in world.port.held and "4712" in world.engine.machines)
    assert seen_held, "it was out of use before it was returned"
    assert set(world.engine.machines) == {"4711"}
    assert world.port.tokens == {"id1"}, "the token of a machine that is gone is removed"
    assert world.port.dead == ["slurm-2"]


def test_a_machine_that_a_job_took_at_the_last_moment_is_not_returned() -> None:
    world = World(idle_s=10.0)
    world.port.wanted = [Demand(4)]
    world.run()
    world.port.wanted = []
    world.join()
    while not world.driver.rules.returning:
        world.run(0.5)
    world.use("slurm-1", 2)
    world.run(20)
    assert set(world.engine.machines) == {"4711"}
    assert world.port.held == {}


def test_a_machine_that_is_wanted_again_is_kept() -> None:
    world = World(idle_s=10.0)
    world.port.wanted = [Demand(4)]
    world.run()
    world.port.wanted = []
    world.join()
    while not world.driver.rules.returning:
        world.run(0.5)
    world.port.wanted = [Demand(1)]
    world.run()
    assert (world.port.held, set(world.engine.machines)) == ({}, {"4711"})


def test_the_minimum_is_held_and_a_lowered_maximum_drains_busy_machines() -> None:
    world = World(low=3, high=3)
    world.run()
    world.join()
    for n in (1, 2, 3):
        world.use(f"slurm-{n}", n)
    world.run(100)
    assert len(world.engine.machines) == 3
    world.settings = EngineSettings("slurm", (1, 2), 60.0)
    world.boot()
    world.run(3)
    assert list(world.port.held) == ["slurm-1"]
    assert len(world.engine.machines) == 3, "its workers still run"
    world.use("slurm-1", 0)
    world.run(3)
    assert sorted(m.agent for m in world.engine.machines.values()) == ["slurm-2", "slurm-3"]


def test_after_a_kill_the_next_driver_takes_all_machines_over() -> None:
    world = World(low=2)
    world.run()
    world.join("4711", used=4)
    world.boot()
    assert len(world.engine.asked) == 1
    world.run(30)
    assert len(world.engine.asked) == 1
    assert set(world.engine.machines) == {"4711", "4712"}
    assert world.port.tokens == {"id1", "id2"}, "a pending machine joins with the token that it was given"
    assert "job 4712 is pending" in str(world.view.coming())


def test_a_kill_between_token_and_request_leaves_no_token() -> None:
    world = World(low=1)
    world.driver._tokens.made([world.port.make_token(1.0)[0]])
    world.boot()
    world.run()
    assert len(world.port.tokens) == 1
    assert world.engine.commands["4711"].files["token"] == b"secret2"
    assert world.port.tokens == {"id2"}


def test_a_kill_between_request_and_record_keeps_the_token() -> None:
    world = World(low=1)
    world.run()
    world.saved.update({"machines": {}, "loose": ["id1"]})
    world.boot()
    world.run()
    assert world.port.tokens == {"id1"}
    world.join()
    world.engine.set("4711", state=GONE, reason="CANCELLED", fenced=True)
    world.settings = EngineSettings("slurm", (0, 2), 60.0)
    world.run(10)
    assert "id1" not in world.port.tokens


def test_a_node_is_usable_only_while_the_engine_agrees() -> None:
    world = World(low=1)
    world.run()
    world.join(used=4)
    world.engine.set("4711", responds=False, reason="node g1 is down*")
    world.run(6)
    assert world.port.held == {"slurm-1": "Slurm has lost contact with it: node g1 is down*"}
    # Slurm requeues the job. The old agent still runs and is connected.
    world.engine.set("4711", responds=True, state=PENDING, node="", reason="BeginTime")
    world.run(6)
    assert "taken it back: job 4711 is pending (BeginTime)" in world.port.held["slurm-1"]
    assert len(world.engine.asked) == 1
    # It comes back on another node: its own name is fenced by the control plane, no other machine is.
    world.engine.set("4711", state=UP, node="g9", reason="")
    world.run(6)
    assert world.port.held == {}


def test_a_preempted_machine_is_fenced_once_its_agent_is_gone() -> None:
    world = World(low=1)
    world.run()
    world.join(used=4)
    world.engine.set("4711", state=PENDING, node="", reason="BeginTime", fenced=True)
    world.run(6)
    assert world.port.dead == [], "its agent is still connected"
    world.engine.set("4711", fenced=False)
    world.port.seen["slurm-1"] = AgentSeen("slurm-1", False, True, 4, 0)
    world.run(3)
    assert world.port.dead == ["slurm-1"]
    world.join(used=4)
    world.port.seen["slurm-1"] = AgentSeen("slurm-1", False, True, 4, 4)
    world.run(10)
    assert world.port.dead == ["slurm-1"], "a short loss of the connection of the new agent means nothing"


def test_no_other_machine_is_used_on_a_node_where_lost_workers_may_run() -> None:
    world = World(low=1)
    world.run()
    world.join(used=4)
    world.engine.set("4711", state=GONE, reason="NODE_FAIL", fenced=False)
    world.run(20)
    assert world.port.dead == [], "the engine has not ended its processes"
    assert world.engine.avoided == {"slurm-1"}, "the name stays with the machine that may still run"
    (new,) = world.engine.machines.values()
    assert new.agent == "slurm-2"
    world.engine.set(new.id, state=UP, node="g4711", reason="")
    world.port.seen["slurm-2"] = AgentSeen("slurm-2", True, False, 4, 0)
    world.run(6)
    assert "workers of the lost agent slurm-1 may still run on g4711" in world.port.held["slurm-2"]
    world.port.seen["slurm-1"] = AgentSeen("slurm-1", False, False)
    world.run(6)
    assert "slurm-2" not in world.port.held


def test_a_time_limit_is_announced_and_a_replacement_is_requested() -> None:
    world = World(low=1, high=2)
    world.run()
    world.join(used=4)
    world.engine.set("4711", state=LEAVING, leaving_at_s=world.now_s + 100, reason="time limit")
    world.run(6)
    assert world.port.leaves["slurm-1"] == pytest.approx(100, abs=5)
    assert len(world.engine.machines) == 2, "it does not count any more"


def test_a_drained_machine_serves_no_demand_and_is_replaced_and_returned() -> None:
    world = World(low=1, high=2, idle_s=10.0)
    world.run()
    world.join()
    world.drain("slurm-1")
    world.port.wanted = [Demand(4)]
    world.run(3)
    assert world.engine.asked[1:] == [(MachineRequest(4), 1)], "its free GPUs are of no use"
    world.join("4712", used=4)
    world.run(15)
    assert list(world.engine.machines) == ["4712", "4713"], "it is returned, and another one replaces it"
    agents = [m.agent for m in world.engine.machines.values()]
    assert agents == ["slurm-2", "slurm-3"], "a name that is drained is not used again"


def test_at_the_maximum_a_drained_machine_is_named_until_it_is_returned_and_replaced() -> None:
    world = World(low=2, high=2, idle_s=10.0)
    world.run()
    world.join()
    world.use("slurm-2", 4)
    world.drain("slurm-1")
    world.port.wanted = [Demand(4)]
    world.run(3)
    assert world.view.coming() == (
        "no further machine is requested from Slurm: --nodes allows 2 machines; "
        "not in use: slurm-1 (somebody drained it); it is returned when it was idle for 10 s"
    )
    world.run(12)
    assert list(world.engine.machines) == ["4712", "4713"]


def test_a_drained_machine_with_work_on_it_stays_and_one_that_is_used_again_too() -> None:
    world = World(low=0, high=2, idle_s=10.0)
    world.port.wanted = [Demand(4)]
    world.run()
    world.join(used=2)
    world.drain("slurm-1")
    world.run(20)
    assert "4711" in world.engine.machines, "a job still uses it"
    world.use("slurm-1", 0)
    world.run(5)
    world.drain("slurm-1", drained=False)
    world.run(20)
    assert "4711" in world.engine.machines
    assert "slurm-1" not in world.port.held


def test_a_machine_whose_agent_stays_away_serves_no_demand_and_is_returned() -> None:
    world = World(low=0, high=2, idle_s=60.0)
    world.port.wanted = [Demand(4)]
    world.run()
    world.join()
    world.port.seen["slurm-1"] = AgentSeen("slurm-1", False, True, 4, 0)
    world.run(20)
    assert len(world.engine.machines) == 1, "it may be back soon"
    world.run(20)
    assert list(world.engine.machines) == ["4711", "4712"]
    world.join("4712", used=4)
    world.run(80)
    assert "4711" in world.engine.machines, "some of its workers may be alive"
    world.port.seen["slurm-1"] = AgentSeen("slurm-1", False, False, 4, 0)
    world.run(5)
    assert "4711" not in world.engine.machines


def test_a_machine_whose_agent_never_connects_delays_further_requests() -> None:
    world = World(low=1, high=8, idle_s=600.0)
    world.port.wanted = [Demand(32)]
    for _ in range(180):
        world.run(1)
        for i in world.engine.machines:
            world.engine.set(i, state=UP, node=f"g{i}", reason="")
        world.port.wanted = [Demand(4 * len(world.engine.machines))] if len(world.engine.machines) < 8 else []
    assert "the agent of job 47" in str(world.view.coming())
    assert world.driver.rules.failures > 0


def test_a_time_limit_that_was_extended_makes_the_machine_usable_again() -> None:
    world = World(low=1, high=2)
    world.run()
    world.join(used=4)
    world.engine.set("4711", state=LEAVING, leaving_at_s=world.now_s + 100, reason="time limit")
    world.run(6)
    assert "slurm-1" in world.port.leaves
    world.engine.set("4711", state=UP, leaving_at_s=None, reason="")
    world.run(6)
    assert world.port.leaves == {}


def test_what_an_agent_announced_and_the_engine_has_withdrawn_is_taken_back() -> None:
    world = World(low=1, high=2)
    world.run()
    world.join(used=4)
    world.port.leaving("slurm-1", 150.0, "the engine takes the machine back")
    world.run(6)
    assert "slurm-1" in world.port.leaves, "the engine announces it later than the agent"
    world.port.leaving("slurm-1", 30.0, "the engine takes the machine back")
    world.run(5)
    assert "slurm-1" in world.port.leaves, "the engine may have answered just before"
    world.run(6)
    assert world.port.leaves == {}, "by now the engine would have announced it too"


def test_an_announcement_that_a_reconnected_agent_does_not_know_is_repeated() -> None:
    world = World(low=1, high=2)
    world.run()
    world.join(used=4)
    world.engine.set("4711", state=LEAVING, leaving_at_s=world.now_s + 100, reason="preempted")
    world.run(6)
    world.port.stays("slurm-1")  # as a reconnected agent, which was told nothing
    world.run(6)
    assert world.port.leaves == {"slurm-1": pytest.approx(90, abs=5)}
    world.port.leaves.clear()
    world.run(6)
    assert world.port.leaves == {}, "what the agent knows is not announced again"


@pytest.mark.parametrize(
    ("ahead_s", "words"),
    [
        (-86400.0, "the server's clock is 1 day ahead of Slurm's"),
        (86400.0, "the server's clock is 1 day behind Slurm's"),
        (1.0, "within 5 s of Slurm's"),
    ],
)
def test_doctor_tells_how_far_the_engines_clock_is_off(ahead_s: float, words: str) -> None:
    world = World()
    world.engine.clock_ahead_s = ahead_s
    (check,) = [check for check in world.view.checks() if check.name == "engine clock"]
    assert check.message == words
    assert check.status == ("ok" if "within" in words else "warning")


def test_refused_requests_are_repeated_ever_more_slowly_and_explained() -> None:
    world = World(low=1)
    world.engine.refusal = "Slurm refuses the request: invalid qos"
    world.run(100)
    assert 3 <= len(world.engine.asked) <= 4
    assert "no machine from Slurm: Slurm refuses the request: invalid qos; the next" in str(
        world.view.coming()
    )
    assert world.port.tokens == set()
    assert [type for type, _ in world.port.events].count("engine.refused") == 1
    world.engine.refusal = ""
    world.run(200)
    world.join()
    assert world.view.coming() is None


def test_machines_that_end_before_their_agent_joins_count_as_failures() -> None:
    world = World(low=1)
    for _ in range(200):
        world.run(0.5)
        for i in list(world.engine.machines):
            world.engine.set(
                i, state=GONE, reason="ended: FAILED, exit code 1: No module named shoal", fenced=True
            )
    assert len(world.engine.asked) <= 4
    assert "No module named shoal" in str(world.view.coming())


def test_an_engine_that_does_not_answer_changes_nothing() -> None:
    world = World(low=1)
    world.run()
    world.join(used=4)
    world.engine.down = True
    world.port.wanted = [Demand(8)]
    world.run(20)
    assert world.port.held == {}
    assert world.view.coming() == "no further machine can be requested: Slurm does not answer"
    assert [type for type, _ in world.port.events].count("engine.unavailable") == 1
    world.engine.down = False
    world.run(20)
    assert len(world.engine.machines) == 3


def test_closing_returns_everything_or_leaves_it_to_the_next() -> None:
    world = World(low=2)
    world.run()
    asyncio.run(world.driver.close(return_machines=False))
    assert (world.engine.detached, world.engine.closed, len(world.port.tokens)) == (True, False, 2)
    world.boot()
    world.run()
    asyncio.run(world.driver.close(return_machines=True))
    assert (world.engine.closed, world.port.tokens) == (True, set())


def test_doctor_names_a_machine_whose_agent_does_not_connect() -> None:
    world = World(low=1, idle_s=600.0)
    world.run()
    world.engine.set("4711", state=UP, node="g1", reason="")
    world.run(2)
    assert [c.status for c in world.view.checks()] == ["ok", "ok"]
    assert "Slurm 22.05.8; machines: 1 up; --nodes 1..4" in world.view.checks()[0].message
    world.run(63.5)
    ports = {c.name: c for c in world.view.checks()}["engine ports"]
    assert ports.status == "error"
    assert "job 4711 runs on g1, and its agent has not been connected for 65 s" in ports.message
    assert "10.0.0.1:7070" in str(ports.hint)


def test_what_the_engine_could_provide_at_most() -> None:
    world = World(low=1, high=3)
    assert world.view.most_gpus("h200") > 1000, "nothing is known before it has answered"
    world.run()
    assert [world.view.most_gpus(t) for t in (None, "a100", "h200")] == [12, 12, 0]
    assert world.view.of_node("slurm-1") == "job 4711 is pending (Priority)"
    world.join()
    assert world.view.of_node("slurm-1") == "job 4711 is up on g4711"
    assert world.view.of_node("by-hand") is None


SAVED = {"kind": "slurm", "nodes": [1, 4], "idle_s": 60.0, "partition": "gpu"}
SETTINGS = {
    "as at the last start": (SAVED, {}, EngineSettings("slurm", (1, 4), 60.0, partition="gpu")),
    "one is changed": (SAVED, {"nodes": [2, 2]}, EngineSettings("slurm", (2, 2), 60.0, partition="gpu")),
    "another engine starts afresh": (SAVED, {"kind": "ray"}, EngineSettings("ray")),
    "given up": (SAVED, {"kind": "none"}, None),
    "never had one": (None, {}, None),
}
WRONG = {
    "--nodes needs an engine": (None, {"nodes": [1, 2]}),
    "--partition is for --engine slurm, and this is ray": (None, {"kind": "ray", "partition": "x"}),
    "--ray-address is for --engine ray, and this is slurm": (SAVED, {"ray_address": "x"}),
    "--engine none takes no --idle": (SAVED, {"kind": "none", "idle_s": 1.0}),
    "3..2 is empty": (SAVED, {"nodes": [3, 2]}),
}


@pytest.mark.parametrize("case", SETTINGS)
def test_settings_are_remembered(case: str) -> None:
    saved, given, want = SETTINGS[case]
    assert settings_from(saved, given) == want


@pytest.mark.parametrize("words", WRONG)
def test_settings_that_contradict_are_refused(words: str) -> None:
    with pytest.raises(ShoalError, match=words.replace(".", r"\.")):
        settings_from(*WRONG[words])
