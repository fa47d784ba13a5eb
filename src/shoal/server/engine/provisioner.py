"""Which machines to request, to return and to keep jobs off: the rules, without I/O and without a clock.

A machine is usable only while its agent is connected and the engine agrees. A machine that is returned is drained
first: no job may use it from the first decision on, and it is returned at a later one, when no worker is left on it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

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
"""After so long without its agent, a running machine is reported, and others are requested in its place."""


@dataclass(frozen=True, slots=True)
class Decision:
    request: tuple[NewMachine, ...] = ()
    #: Ids of the machines to return now. Nothing runs on them.
    release: tuple[str, ...] = ()


@dataclass(slots=True)
class Provisioner:
    """What is remembered of a machine, by the engine's id:

    | set              | from                               | until                     | what it means          |
    |------------------|------------------------------------|---------------------------|------------------------|
    | `machines`       | it is requested or found           | the engine lists it gone  | it exists              |
    | `joined`         | its agent connects the first time  | it is gone                | its start was no failure |
    | `absent_since_s` | it runs without its agent          | the agent is back         | late after LATE_S      |
    | `unusable`       | it is drained, late or silent      | that is over              | it serves no demand    |
    | `returning`      | it shall be returned               | it is wanted again        | jobs leave it          |
    | `released`       | jobs have left, the engine is told | it is gone                | it is held no longer   |

    What is remembered of an agent, by its name. One machine may follow another under the same name:

    | set          | from                                    | until                    | what it means          |
    |--------------|-----------------------------------------|--------------------------|------------------------|
    | `gone`       | its machine is gone                     | its connection is closed | its node is not used   |
    | `taken_back` | requeued, and the engine has ended it   | its connection is closed | then report its end    |
    | `unfenced`   | gone or requeued, but it may still live | no worker can be alive   | nobody uses that node  |
    """

    title: str
    id_word: str
    limits: CapacityLimits
    machines: dict[str, Machine] = field(default_factory=dict)
    #: With the time since when no job may use them.
    returning: dict[str, float] = field(default_factory=dict)
    released: set[str] = field(default_factory=set)
    joined: set[str] = field(default_factory=set)
    absent_since_s: dict[str, float] = field(default_factory=dict)
    #: Names of all agents that the engine runs or ran.
    agents: set[str] = field(default_factory=set)
    #: With the engine's words.
    gone: dict[str, str] = field(default_factory=dict)
    taken_back: dict[str, str] = field(default_factory=dict)
    #: With the engine's name of the node.
    unfenced: dict[str, str] = field(default_factory=dict)
    #: With the reason.
    unusable: dict[str, str] = field(default_factory=dict)
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
        self._note_absent(seen, now_s)
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

    def _note_absent(self, seen: Mapping[str, AgentSeen], now_s: float) -> None:
        running = [m for m in self.machines.values() if m.state is MachineState.UP]
        absent = [m.id for m in running if not self._connected(m, seen)]
        self.absent_since_s = {i: self.absent_since_s.get(i, now_s) for i in absent}

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
        free_gpus = sum(m.free_gpus for m in held if m.usable)
        self.unmet_gpus = max(0, sum(d.gpus for d in demand) - free_gpus)
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
        unusable = {m.id: why for m in here if (why := self._why_unusable(m, seen, now_s))}
        for machine_id in unusable.keys() - self.unusable.keys() - self.joined:
            self.failed(
                f"the agent of {self.id_word} {machine_id} does not connect: see `shoal doctor`", now_s
            )
        self.unusable = unusable
        usual_gpus = max((o.gpus for o in offers), default=0)
        found = [self._as_held(m, seen.get(m.agent), usual_gpus) for m in here]
        wanted = bool(demand)
        in_use = [m.id for m in found if m.busy or (m.coming and wanted)]
        idle_s = self._idle.update(now_s, [m.id for m in found], in_use)
        return [replace(m, idle_for_s=idle_s[m.id]) for m in found]

    def _as_held(self, machine: Machine, agent: AgentSeen | None, usual_gpus: int) -> HeldMachine:
        usable = machine.id not in self.unusable
        connected = agent is not None and agent.connected
        coming = machine.state.is_coming or (not connected and usable)
        gpus = agent.gpus if agent is not None and connected else machine.gpus or usual_gpus
        used_gpus = 0 if coming or agent is None else agent.used_gpus
        return HeldMachine(
            machine.id, gpus, machine.gpu_type, max(0, gpus - used_gpus), coming, usable=usable
        )

    def _why_unusable(self, machine: Machine, seen: Mapping[str, AgentSeen], now_s: float) -> str:
        """Why no job gets a machine that runs. Empty: jobs do, or its agent is expected soon."""
        if machine.state.is_coming:
            return ""
        if not machine.responds:
            return f"{self.title} has lost contact with it"
        if self._connected(machine, seen):
            return seen[machine.agent].blocked
        absent_s = now_s - self.absent_since_s.get(machine.id, now_s)
        return f"its agent has not been connected for {absent_s:.0f} s" if absent_s > LATE_S else ""

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
        """Machines that run, and whose agent has not been connected for long."""
        found = []
        for machine_id, since_s in self.absent_since_s.items():
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
        known = self.joined | self.unusable.keys()
        starting = [m for m in self.machines.values() if m.state is MachineState.UP and m.id not in known]
        if starting:
            ids = ", ".join(f"{self.id_word} {m.id}" for m in starting[:3])
            return f"the agent starts on {counted(len(starting), 'machine')} of {self.title} ({ids})"
        if self.trouble:
            wait_s = max(0.0, self.retry_at_s - now_s)
            return f"no machine from {self.title}: {self.trouble}; the next attempt is in {wait_s:.0f} s"
        if self.unmet_gpus and len(self.machines) >= self.limits.max_machines:
            most = counted(self.limits.max_machines, "machine")
            text = f"no further machine is requested from {self.title}: --nodes allows {most}"
            return text + "".join(f"; {words}" for words in self._of_unusable())
        return None

    def _of_unusable(self) -> list[str]:
        """One clause about the machines that are held and that no job gets."""
        held = [(self.machines[i], why) for i, why in self.unusable.items() if i in self.machines]
        if not held:
            return []
        named = ", ".join(f"{m.agent} ({why})" for m, why in held[:3])
        return [f"not in use: {named}; it is returned when it was idle for {self.limits.idle_s:g} s"]


def _in_brackets(words: str) -> str:
    return f" ({words})" if words else ""
