"""Which machines to request, to return and to keep jobs off: the rules, without I/O and without a clock.

A machine is usable only while its agent is connected and the engine agrees. A machine that is returned is drained
first: no job may use it from the first decision on, and it is returned at a later one, when no worker is left on it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from shoal.core.words import counted
from shoal.engines.base import Machine, MachineState, NewMachine, describe_waiting
from shoal.engines.capacity import (
    CapacityLimits,
    Demand,
    HeldMachine,
    IdleTimes,
    decide_capacity,
    retry_delay_s,
)
from shoal.server.engine.port import AgentSeen

LATE_S = 30.0
"""After so long, an agent that has not connected from a running machine is reported."""


@dataclass(frozen=True, slots=True)
class Decision:
    request: tuple[NewMachine, ...] = ()
    #: Ids of the machines to return now. Nothing runs on them.
    release: tuple[str, ...] = ()


@dataclass(slots=True)
class Provisioner:
    title: str
    id_word: str
    limits: CapacityLimits
    machines: dict[str, Machine] = field(default_factory=dict)
    #: Machines that are being returned, with the time since when no job may use them.
    returning: dict[str, float] = field(default_factory=dict)
    released: set[str] = field(default_factory=set)
    #: Agents of machines that are gone, with the engine's words. Their connection may still be open.
    gone: dict[str, str] = field(default_factory=dict)
    #: Names of all agents that the engine runs or ran.
    agents: set[str] = field(default_factory=set)
    joined: set[str] = field(default_factory=set)
    up_since_s: dict[str, float] = field(default_factory=dict)
    #: Agents that may still run on a node that the engine has lost, by the engine's name of the node.
    unfenced: dict[str, str] = field(default_factory=dict)
    #: Agents that the engine has ended although it still has their request. Their connection may not be closed yet.
    taken_back: dict[str, str] = field(default_factory=dict)
    failures: int = 0
    retry_at_s: float = 0.0
    trouble: str = ""
    unmet_gpus: int = 0
    _idle: IdleTimes = field(default_factory=IdleTimes)

    # What the engine reports

    def polled(self, found: Sequence[Machine], seen: Mapping[str, AgentSeen], now_s: float) -> list[Machine]:
        """Take in what the engine reports. Return the machines that are gone."""
        gone = [m for m in found if m.state is MachineState.GONE]
        before = self.machines
        self.machines = {m.id: m for m in found if m.state is not MachineState.GONE}
        for machine in self.machines.values():
            self.agents.add(machine.agent)
            self.gone.pop(machine.agent, None)
            self._note_node(before.get(machine.id), machine)
        running = [m for m in self.machines.values() if m.state is MachineState.UP]
        self.up_since_s = {m.id: self.up_since_s.get(m.id, now_s) for m in running}
        self.joined &= self.machines.keys() | {m.id for m in gone}
        for machine in self.machines.values():
            up = machine.state is MachineState.UP and self._connected(machine, seen)
            if up and machine.id not in self.joined:
                self.joined.add(machine.id)
                self.failures, self.trouble = 0, ""
        for machine in gone:
            self._went(machine, before.get(machine.id), now_s)
        self.returning = {i: s for i, s in self.returning.items() if i in self.machines}
        self.released &= self.machines.keys()
        alive = {name for name, agent in seen.items() if agent.may_have_workers}
        self.unfenced = {agent: node for agent, node in self.unfenced.items() if agent in alive}
        self.gone = {a: why for a, why in self.gone.items() if a in seen and seen[a].connected}
        return gone

    def _note_node(self, before: Machine | None, machine: Machine) -> None:
        """A machine that was requeued has left its node. Its old agent may still run there."""
        if before is not None and before.node and machine.node != before.node:
            self.unfenced[machine.agent] = before.node
        if machine.state is MachineState.PENDING and machine.fenced:
            self.taken_back[machine.agent] = f"{self.title} has taken the machine back"
        elif machine.state is not MachineState.PENDING:
            self.taken_back.pop(machine.agent, None)  # another agent runs under its name now

    def _went(self, machine: Machine, before: Machine | None, now_s: float) -> None:
        agent = machine.agent or (before.agent if before is not None else "")
        if agent:
            self.gone[agent] = machine.reason
            node = machine.node or (before.node if before is not None else "")
            if machine.fenced or machine.id in self.released:
                self.unfenced.pop(agent, None)
            elif node:
                self.unfenced[agent] = node
        if machine.id not in self.joined and machine.id not in self.released | self.returning.keys():
            self.failed(machine.reason, now_s)
        self.joined.discard(machine.id)

    def failed(self, why: str, now_s: float) -> None:
        """A request was refused, or a machine ended before its agent had joined."""
        self.failures += 1
        self.retry_at_s = now_s + retry_delay_s(self.failures)
        self.trouble = why

    def requested(self, machines: Iterable[Machine]) -> None:
        """The engine has accepted these requests."""
        for machine in machines:
            self.machines[machine.id] = machine
            self.agents.add(machine.agent)

    # What to do

    def ended(self, seen: Mapping[str, AgentSeen]) -> dict[str, str]:
        """Agents of requeued machines whose processes the engine has ended, each once.

        As long as the agent is connected, the engine has not ended it after all.
        """
        found = {a: why for a, why in self.taken_back.items() if a in seen and not seen[a].connected}
        self.taken_back = {a: why for a, why in self.taken_back.items() if a not in found}
        return found

    def keep_off(self, seen: Mapping[str, AgentSeen]) -> dict[str, str]:
        """The agents whose nodes must not be used, each with the reason."""
        held = {agent: why for agent, why in self.gone.items() if agent in seen}
        for machine in self.machines.values():
            why = self._why_not(machine)
            if why is not None:
                held[machine.agent] = why
        # Agents that are known from before, and whose machine the engine does not list.
        listed = {m.agent for m in self.machines.values()}
        for agent in self.agents - listed - held.keys():
            if agent in seen and seen[agent].connected:
                held[agent] = f"{self.title} has no machine for it any more"
        return held

    def _why_not(self, machine: Machine) -> str | None:
        if machine.id in self.returning or machine.id in self.released:
            return f"it is being returned to {self.title}"
        if machine.state.is_coming:
            return (
                f"{self.title} has taken it back: {self.id_word} {machine.id} is {machine.state}"
                + _in_brackets(machine.reason)
            )
        if not machine.responds:
            return f"{self.title} has lost contact with it: {machine.reason}"
        other = next(
            (a for a, node in self.unfenced.items() if node == machine.node and a != machine.agent), None
        )
        if other is not None:
            return f"workers of the lost agent {other} may still run on {machine.node}"
        return None

    def decide(
        self,
        demand: Sequence[Demand],
        offers: Sequence[NewMachine],
        seen: Mapping[str, AgentSeen],
        now_s: float,
    ) -> Decision:
        held = self._held(demand, offers, seen, now_s)
        change = decide_capacity(self.limits, demand, held, offers)
        self.unmet_gpus = max(0, sum(d.gpus for d in demand) - sum(m.free_gpus for m in held))
        wanted_back = [*change.release, *self._over_the_maximum(held)]
        ready = [i for i in self.returning if i in wanted_back and self._is_drained(i, seen, now_s)]
        # A machine that is wanted again is kept.
        self.returning = {i: self.returning.get(i, now_s) for i in wanted_back}
        request = change.request if now_s >= self.retry_at_s else ()
        self.released |= set(ready)
        return Decision(request, tuple(ready))

    def _held(
        self,
        demand: Sequence[Demand],
        offers: Sequence[NewMachine],
        seen: Mapping[str, AgentSeen],
        now_s: float,
    ) -> list[HeldMachine]:
        here = [
            m
            for m in self.machines.values()
            if m.state is not MachineState.LEAVING and m.id not in self.released
        ]
        usual_gpus = max((o.gpus for o in offers), default=0)
        found = []
        for machine in here:
            agent = seen.get(machine.agent)
            coming = machine.state.is_coming or agent is None or not agent.connected
            gpus = machine.gpus or usual_gpus if coming or agent is None else agent.gpus
            free = gpus if coming or agent is None else max(0, gpus - agent.used_gpus)
            if not machine.responds:
                free = 0
            found.append(HeldMachine(machine.id, gpus, machine.gpu_type, free, coming))
        wanted = bool(demand)
        in_use = [m.id for m in found if m.busy or (m.coming and wanted)]
        idle_s = self._idle.update(now_s, [m.id for m in found], in_use)
        return [HeldMachine(m.id, m.gpus, m.gpu_type, m.free_gpus, m.coming, idle_s[m.id]) for m in found]

    def _over_the_maximum(self, held: Sequence[HeldMachine]) -> list[str]:
        """The maximum was lowered: return those with the least work."""
        least = sorted(held, key=lambda m: (not m.coming, m.gpus - m.free_gpus, m.id))
        return [m.id for m in least[: max(0, len(held) - self.limits.max_machines)]]

    def _is_drained(self, machine_id: str, seen: Mapping[str, AgentSeen], now_s: float) -> bool:
        if now_s <= self.returning[machine_id]:
            return False
        agent = seen.get(self.machines[machine_id].agent)
        return agent is None or (not agent.used_gpus and not agent.may_have_workers)

    # What to tell

    def late(self, seen: Mapping[str, AgentSeen], now_s: float) -> list[tuple[Machine, float]]:
        """Machines that run, and whose agent has not connected for long."""
        found = []
        for machine_id, since_s in self.up_since_s.items():
            machine = self.machines.get(machine_id)
            if machine is not None and now_s - since_s > LATE_S and not self._connected(machine, seen):
                found.append((machine, now_s - since_s))
        return found

    @staticmethod
    def _connected(machine: Machine, seen: Mapping[str, AgentSeen]) -> bool:
        return machine.agent in seen and seen[machine.agent].connected

    def explain(self, now_s: float) -> str | None:
        """One sentence about machines that jobs wait for. None: there is nothing to say."""
        coming = describe_waiting(self.title, self.id_word, list(self.machines.values()))
        if coming is not None:
            return coming
        starting = [
            m for m in self.machines.values() if m.state is MachineState.UP and m.id not in self.joined
        ]
        if starting:
            ids = ", ".join(f"{self.id_word} {m.id}" for m in starting[:3])
            return f"the agent starts on {counted(len(starting), 'machine')} of {self.title} ({ids})"
        if self.trouble:
            wait_s = max(0.0, self.retry_at_s - now_s)
            return f"no machine from {self.title}: {self.trouble}; the next attempt is in {wait_s:.0f} s"
        if self.unmet_gpus and len(self.machines) >= self.limits.max_machines:
            most = counted(self.limits.max_machines, "machine")
            return f"no further machine is requested from {self.title}: --nodes allows {most}"
        return None


def _in_brackets(words: str) -> str:
    return f" ({words})" if words else ""
