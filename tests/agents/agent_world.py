"""A world for the two halves of the agents' protocol: processes, disks, clocks and a network that can break.

Everything that the machines must not rely on is under the test's control: when a message arrives, when each end notices
that a connection is broken, restarts of either side, the offset and speed of each clock. The world checks after each
change what must never happen.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

import msgspec

from shoal.agents import agent_state as ag
from shoal.agents import fleet_records as fr
from shoal.agents.agent_state import AgentState
from shoal.agents.fleet_records import Link, Timing
from shoal.agents.fleet_state import FleetState
from shoal.executors import base
from shoal.wire import agent_messages as am

TIMING = Timing(lease_s=30.0, heartbeat_s=5.0, silence_s=15.0, keeper_margin_s=2.0)
KEEPER_S = 1.5
"""The keepers of the world kill their workers this long after the lease at the latest."""


@dataclass
class Clock:
    """A clock of one machine: `read(t)` at the true time t."""

    offset_s: float = 0.0
    rate: float = 1.0

    def read(self, true_s: float) -> float:
        return self.offset_s + self.rate * true_s


@dataclass
class Process:
    """A worker with its keeper and its directory on the machine's disk."""

    alive: bool = True
    output: bytearray = field(default_factory=bytearray)
    exited: am.Exited | None = None
    over_since_s: float | None = None  # when its lease was first seen to have ended


@dataclass
class Connection:
    to_fleet: deque[am.AgentMessage] = field(default_factory=deque)
    to_agent: deque[am.AgentMessage] = field(default_factory=deque)
    broken: bool = False
    agent_sees: bool = True  # the agent believes that it is open
    fleet_sees: bool = True
    accepted: bool = False


@dataclass
class Machine:
    """A machine: what survives a restart of its agent (the disk, the processes), and the agent itself."""

    name: str
    instance: str
    clock: Clock
    gpus: int = 2
    disk: dict[str, Process] = field(default_factory=dict)
    lease_until_s: float = -math.inf
    state: AgentState = field(init=False)
    connection: Connection | None = None
    runs: int = 0

    def __post_init__(self) -> None:
        self.boot()

    def boot(self) -> None:
        """The agent starts, and adopts what it finds on its disk."""
        self.runs += 1
        node = am.NodeFacts(self.name, self.gpus, "virtual", True)
        self.state = AgentState(self.name, f"{self.instance}-{self.runs}", (node,))
        for worker in self.disk:
            self.state.found(worker)


class World:
    def __init__(self, machines: list[Machine], fleet_clock: Clock) -> None:
        self.now_s = 1000.0
        self.machines, self.fleet_clock = machines, fleet_clock
        self.epochs = 0
        #: What the server has stored: workers that it has started, on which node, and their reported ends.
        self.stored: dict[str, str] = {}
        self.exits: dict[str, am.Exited] = {}
        self.copies: dict[str, bytearray] = {}
        self.agents_stored: dict[str, tuple[str, tuple[am.NodeFacts, ...]]] = {}
        self.starts: dict[str, int] = {}
        self.events: list[base.NodeChange] = []
        self.refusals: list[str] = []
        #: Connections by agent name that the fleet uses.
        self.used: dict[str, Connection] = {}
        self.open: list[tuple[Machine, Connection]] = []
        self.boot_fleet()

    # Both ends' clocks

    def fleet_now(self) -> float:
        return self.fleet_clock.read(self.now_s)

    def advance(self, seconds: float) -> None:
        """Let time pass. Keepers kill their workers within KEEPER_S after the lease has ended."""
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.now_s = min(self.now_s + 0.5, end_s)
            for machine in self.machines:
                over = machine.clock.read(self.now_s) >= machine.lease_until_s
                for name, process in machine.disk.items():
                    if not process.alive or not over:
                        process.over_since_s = None
                    elif process.over_since_s is None:
                        process.over_since_s = self.now_s
                    elif self.now_s - process.over_since_s >= KEEPER_S - 0.5:
                        self.end(
                            machine,
                            name,
                            am.Exited(name, signal="SIGKILL", why="the lease ended", node_lost=True),
                        )
        self.check()

    # The fleet

    def boot_fleet(self) -> None:
        """The control plane starts, with what it has stored."""
        for _, connection in self.open:
            connection.broken, connection.fleet_sees = True, False
            connection.to_fleet.clear()
        self.used = {}
        self.epochs += 1
        self.fleet = FleetState(f"epoch-{self.epochs}", TIMING)
        for agent, (instance, nodes) in self.agents_stored.items():
            self.fleet.restore(agent, instance, nodes, self.fleet_now())
        for worker, node in self.stored.items():
            if worker not in self.exits:
                self.obey_fleet(self.fleet.adopt(worker, node, len(self.copies[worker]), self.fleet_now()))

    def start(self, worker: str, node: str) -> None:
        self.stored[worker] = node
        self.copies[worker] = bytearray()
        self.obey_fleet(self.fleet.start(am.Start(worker, node, 0, ("true",), "/", {})))

    def order(self, order: am.Stop | am.Suspend | am.Wake) -> None:
        self.obey_fleet(self.fleet.order(order))

    def tick(self) -> None:
        self.obey_fleet(self.fleet.tick(self.fleet_now()))

    def obey_fleet(self, effects: list[fr.Effect], connection: Connection | None = None) -> None:
        for effect in effects:
            if isinstance(effect, fr.Accept):
                assert connection is not None
                old = self.used.get(effect.agent)
                if old is not None and old is not connection:
                    self.close(old)
                self.used[effect.agent] = connection
                connection.accepted = True
                self.agents_stored[effect.agent] = (effect.instance, effect.nodes)
            elif isinstance(effect, fr.Refuse):
                assert connection is not None
                self.refusals.append(effect.why)
                connection.to_agent.append(am.Refused(effect.why, effect.final))
                connection.fleet_sees = False
            elif isinstance(effect, fr.Send):
                if not self.used[effect.agent].broken:
                    self.used[effect.agent].to_agent.append(effect.message)
            elif isinstance(effect, fr.Cut):
                self.close(self.used.pop(effect.agent))
            elif isinstance(effect, fr.AppendLog):
                copy = self.copies[effect.worker]
                assert effect.position == len(copy), "a gap or a repetition in the output"
                copy += effect.data
            elif isinstance(effect, fr.WorkerExit):
                self.report(effect.exited)
            else:
                self.events.append(effect)
        self.check()

    def report(self, exited: am.Exited) -> None:
        worker = exited.worker
        assert worker in self.stored, "the end of a worker that nobody started"
        assert worker not in self.exits, "an end reported twice"
        agent = self.fleet.agents.get(self.stored[worker])
        if agent is not None and agent.link is Link.CONNECTED:
            assert len(self.copies[worker]) >= exited.log_end, "an end reported before the output"
        self.exits[worker] = exited

    def close(self, connection: Connection) -> None:
        """The fleet closes it. Messages on the way to the agent are lost."""
        connection.broken, connection.fleet_sees = True, False
        connection.to_agent.clear()
        connection.to_fleet.clear()

    # The machines

    def connect(self, machine: Machine) -> None:
        """The agent opens a connection, unless it believes that it has one."""
        if machine.connection is not None:
            return
        connection = Connection()
        hello = machine.state.connected(machine.clock.read(self.now_s), 0.0)
        connection.to_fleet.append(hello)
        machine.connection = connection
        self.open.append((machine, connection))

    def kill_agent(self, machine: Machine) -> None:
        """kill -9 of the agent and a new start. Its workers and its disk stay."""
        if machine.connection is not None:
            machine.connection.broken, machine.connection.agent_sees = True, False
            machine.connection.to_agent.clear()
            machine.connection = None
        machine.boot()
        now_s = machine.clock.read(self.now_s)
        for process in machine.disk.values():
            if process.exited is not None:
                self.obey_agent(machine, machine.state.exited(process.exited, now_s))

    def end(self, machine: Machine, worker: str, exited: am.Exited) -> None:
        """A worker ends."""
        process = machine.disk[worker]
        if not process.alive:
            return
        process.alive = False
        process.exited = msgspec.structs.replace(exited, log_end=len(process.output), ago_s=0.0)
        effects = machine.state.exited(process.exited, machine.clock.read(self.now_s))
        self.obey_agent(machine, effects)

    def renew(self, machine: Machine) -> None:
        self.obey_agent(machine, machine.state.renew(machine.clock.read(self.now_s), 0.0))

    def ship_logs(self, machine: Machine, max_bytes: int = 1 << 20) -> None:
        for read in machine.state.log_reads():
            output = machine.disk[read.worker].output if read.worker in machine.disk else b""
            data = bytes(output[read.begin : read.begin + min(read.max_bytes, max_bytes)])
            self.obey_agent(machine, machine.state.log_read(read, read.begin, data))

    def obey_agent(self, machine: Machine, effects: list[ag.Effect]) -> None:
        for effect in effects:
            if isinstance(effect, ag.Send):
                if machine.connection is not None and not machine.connection.broken:
                    machine.connection.to_fleet.append(effect.message)
            elif isinstance(effect, ag.SetLease):
                machine.lease_until_s = effect.until_s
            elif isinstance(effect, ag.Do):
                self.carry_out(machine, effect.order)
            elif isinstance(effect, ag.TurnedAway):
                self.agent_notices(machine)
        self.check()

    def carry_out(self, machine: Machine, order: am.Order) -> None:
        if isinstance(order, am.Start):
            assert order.worker not in machine.disk, "a directory used twice"
            machine.disk[order.worker] = Process()
            self.starts[order.worker] = self.starts.get(order.worker, 0) + 1
        elif isinstance(order, am.Stop):
            self.end(machine, order.worker, am.Exited(order.worker, signal="SIGTERM", told=True))
        elif isinstance(order, am.Forget):
            process = machine.disk.pop(order.worker, None)
            assert process is None or not process.alive

    def agent_notices(self, machine: Machine) -> None:
        """The agent sees that its connection is broken, or closes it."""
        assert machine.connection is not None
        machine.connection.broken, machine.connection.agent_sees = True, False
        machine.connection.to_agent.clear()
        machine.connection = None
        machine.state.disconnected()

    # The network

    def cut(self, connection: Connection) -> None:
        """Everything on the way is lost. Each end notices on its own."""
        connection.broken = True
        connection.to_agent.clear()
        connection.to_fleet.clear()

    def fleet_notices(self, connection: Connection) -> None:
        connection.fleet_sees = False
        for agent, used in list(self.used.items()):
            if used is connection:
                del self.used[agent]
                self.obey_fleet(self.fleet.disconnected(agent, "connection closed", self.fleet_now()))

    def deliver_to_fleet(self, machine: Machine, connection: Connection) -> None:
        message = connection.to_fleet.popleft()
        if not connection.fleet_sees:
            return
        if isinstance(message, am.AgentHello):
            effects = self.fleet.hello(message, machine.instance, self.fleet_now(), 0.0)
            self.obey_fleet(effects, connection)
        elif self.used.get(machine.name) is connection:
            self.obey_fleet(self.fleet.received(machine.name, message, self.fleet_now(), 0.0))

    def deliver_to_agent(self, machine: Machine, connection: Connection) -> None:
        message = connection.to_agent.popleft()
        if machine.connection is connection:
            self.obey_agent(machine, machine.state.received(message, machine.clock.read(self.now_s)))

    def exchange(self) -> None:
        """All messages arrive, and those that answer them."""
        while any(c.to_fleet or c.to_agent for _, c in self.open):
            for machine, connection in list(self.open):
                while connection.to_fleet:
                    self.deliver_to_fleet(machine, connection)
                while connection.to_agent:
                    self.deliver_to_agent(machine, connection)
            for machine in self.machines:
                self.ship_logs(machine)

    # What must never happen

    def check(self) -> None:
        assert all(count == 1 for count in self.starts.values()), "a worker started twice"
        for machine in self.machines:
            for name, process in machine.disk.items():
                if process.alive:
                    assert name not in self.exits, f"{name} is alive after its end was reported"
                copy = self.copies[name]
                assert bytes(process.output[: len(copy)]) == bytes(copy)

    # The end of a story

    def settle(self, rounds: int) -> None:
        """The network heals, and both sides run until nothing changes any more."""
        for _ in range(rounds):
            for machine, connection in list(self.open):
                if connection.broken:
                    if connection.fleet_sees:
                        self.fleet_notices(connection)
                    if machine.connection is connection:
                        self.agent_notices(machine)
            self.open = [(m, c) for m, c in self.open if not c.broken]
            for machine in self.machines:
                self.connect(machine)
            self.exchange()
            self.advance(2.0)
            for machine in self.machines:
                self.renew(machine)
            self.tick()

    def link(self, agent: str) -> Link:
        return self.fleet.agents[agent].link
