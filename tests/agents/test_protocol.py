"""Agents and the control plane over a network that breaks, with restarts of both and clocks that differ."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from shoal.agents.fleet_records import CLOCK_DRIFT, Link
from shoal.wire import agent_messages as am

from .agent_world import Clock, Machine, World

clocks = st.builds(Clock, st.floats(-1e6, 1e6), st.floats(1 - CLOCK_DRIFT / 2, 1 + CLOCK_DRIFT / 2))


class AgentsMachine(RuleBasedStateMachine):
    """Two nodes, and a third machine that claims the name of the first."""

    @initialize(data=st.data())
    def build(self, data: st.DataObject) -> None:
        self.world = World(
            [
                Machine("a", "first", data.draw(clocks)),
                Machine("b", "second", data.draw(clocks)),
                Machine("a", "impostor", data.draw(clocks), gpus=4),
            ],
            data.draw(clocks),
        )
        self.count = 0
        for machine in self.world.machines[: data.draw(st.integers(0, 2))]:
            self.world.connect(machine)
            self.world.exchange()
            self.start(machine.name)

    @rule()
    def exchange(self) -> None:
        self.world.exchange()

    @rule(data=st.data(), noticed=st.booleans())
    def connection_breaks_and_returns(self, data: st.DataObject, noticed: bool) -> None:
        machine = self.world.machines[data.draw(st.integers(0, 2))]
        if (connection := machine.connection) is not None:
            self.world.cut(connection)
            if noticed:
                self.world.fleet_notices(connection)
            self.world.agent_notices(machine)
        self.world.connect(machine)

    @rule(seconds=st.floats(0.5, 6.0))
    def silence(self, seconds: float) -> None:
        """Nothing arrives until about the end of the lease."""
        end_s = self.world.now_s + 26.0 + seconds
        while self.world.now_s < end_s:
            self.world.advance(1.0)
            self.world.tick()

    def pick(self, data: st.DataObject, what: list):  # type: ignore[no-untyped-def]
        return data.draw(st.sampled_from(what)) if what else None

    @rule(which=st.integers(0, 2))
    def connect(self, which: int) -> None:
        self.world.connect(self.world.machines[which])

    @rule(data=st.data())
    def to_fleet(self, data: st.DataObject) -> None:
        found = self.pick(data, [i for i, (_, c) in enumerate(self.world.open) if c.to_fleet])
        for _ in range(data.draw(st.integers(1, 6))):
            if found is not None and self.world.open[found][1].to_fleet:
                self.world.deliver_to_fleet(*self.world.open[found])

    @rule(data=st.data())
    def to_agent(self, data: st.DataObject) -> None:
        found = self.pick(data, [i for i, (_, c) in enumerate(self.world.open) if c.to_agent])
        for _ in range(data.draw(st.integers(1, 6))):
            if found is not None and self.world.open[found][1].to_agent:
                self.world.deliver_to_agent(*self.world.open[found])

    @rule(data=st.data())
    def cut(self, data: st.DataObject) -> None:
        found = self.pick(data, [i for i, (_, c) in enumerate(self.world.open) if not c.broken])
        if found is not None:
            self.world.cut(self.world.open[found][1])

    @rule(data=st.data())
    def fleet_notices(self, data: st.DataObject) -> None:
        broken = [i for i, (_, c) in enumerate(self.world.open) if c.broken and c.fleet_sees]
        found = self.pick(data, broken)
        if found is not None:
            self.world.fleet_notices(self.world.open[found][1])

    @rule(data=st.data())
    def agent_notices(self, data: st.DataObject) -> None:
        broken = [i for i, m in enumerate(self.world.machines) if m.connection and m.connection.broken]
        found = self.pick(data, broken)
        if found is not None:
            self.world.agent_notices(self.world.machines[found])

    @rule(which=st.integers(0, 2), gpus=st.integers(1, 8))
    def kill_agent(self, which: int, gpus: int) -> None:
        self.world.machines[which].gpus = gpus
        self.world.kill_agent(self.world.machines[which])

    @rule()
    def restart_fleet(self) -> None:
        self.world.boot_fleet()

    @rule(seconds=st.sampled_from([0.1, 1.0, 4.0, 12.0, 31.0, 40.0]))
    def time_passes(self, seconds: float) -> None:
        self.world.advance(seconds)

    @rule()
    def tick(self) -> None:
        self.world.tick()

    @rule(which=st.integers(0, 2))
    def renew(self, which: int) -> None:
        self.world.renew(self.world.machines[which])

    @rule(which=st.integers(0, 2), max_bytes=st.integers(1, 7))
    def ship_logs(self, which: int, max_bytes: int) -> None:
        self.world.ship_logs(self.world.machines[which], max_bytes)

    @precondition(lambda self: self.count < 8)
    @rule(node=st.sampled_from(["a", "b"]))
    def start_a_worker(self, node: str) -> None:
        self.start(node)

    def start(self, node: str) -> None:
        self.count += 1
        self.world.start(f"w{self.count}", node)

    def a_worker(self, data: st.DataObject) -> str | None:
        return self.pick(data, [w for w in self.world.stored if w not in self.world.exits])

    @rule(data=st.data(), kill=st.booleans())
    def stop(self, data: st.DataObject, kill: bool) -> None:
        worker = self.a_worker(data)
        if worker is not None:
            self.world.order(am.Stop(worker, kill))

    @rule(data=st.data())
    def suspend_and_wake(self, data: st.DataObject) -> None:
        worker = self.a_worker(data)
        if worker is not None:
            self.world.order(am.Suspend(worker))
            self.world.order(am.Wake(worker))

    def a_process(self, data: st.DataObject):  # type: ignore[no-untyped-def]
        alive = [(i, w) for i, m in enumerate(self.world.machines) for w, p in m.disk.items() if p.alive]
        return self.pick(data, alive)

    @rule(data=st.data(), text=st.binary(min_size=1, max_size=20))
    def print_output(self, data: st.DataObject, text: bytes) -> None:
        found = self.a_process(data)
        if found is not None:
            self.world.machines[found[0]].disk[found[1]].output += text

    @rule(data=st.data())
    def worker_ends(self, data: st.DataObject) -> None:
        found = self.a_process(data)
        if found is not None:
            self.world.end(self.world.machines[found[0]], found[1], am.Exited(found[1], code=0))

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        world = self.world
        world.settle(20)  # longer than the lease
        for worker in world.stored:
            if worker not in world.exits:
                world.order(am.Stop(worker))
        world.settle(3)
        # The impostor is refused for as long as the first agent is connected, or the other way round.
        held = [m for m in world.machines if m.connection is not None and m.connection.accepted]
        assert sorted(m.name for m in held) == ["a", "b"]
        for machine in held:
            assert not any(p.alive for p in machine.disk.values())
            assert not machine.disk, "an ended worker was not forgotten"
            assert not world.fleet.agents[machine.name].outbox, "a command was not acknowledged"
            assert world.link(machine.name) is Link.CONNECTED
        assert set(world.exits) == set(world.stored), "a worker without an end"


TestAgents = AgentsMachine.TestCase
TestAgents.settings = settings(
    max_examples=200,
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
