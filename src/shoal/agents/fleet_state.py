"""The control plane's side of its protocol with all agents: a state machine without I/O and without a clock.

The shell (`fleet.py`) passes in calls, messages and the time of its monotonic clock; the machine answers with effects,
which the shell carries out in order. Rules:

- Each worker that was started or adopted ends in exactly one `WorkerExit`.
- A worker of a silent agent is reported as ended only when it cannot be alive: after the last lease that was granted,
  plus a margin for the keepers and for clocks that run at different speeds.
- A command is repeated after a broken connection until the agent acknowledges it. The command to start a worker is
  dropped as soon as the agent is known to have the worker: no worker starts twice.
- A worker that an agent has and the control plane does not want is killed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from shoal import __version__
from shoal.agents.fleet_records import (
    ANY_INSTANCE,
    INSTALL,
    MOST_RIVALS,
    Accept,
    Agent,
    AppendLog,
    Cut,
    Effect,
    EndsUnknown,
    Link,
    Refuse,
    Send,
    Timing,
    Worker,
    WorkerExit,
    node_info,
)
from shoal.executors.base import NodeLeaving, NodeLost, NodeUnreachable, NodeUp
from shoal.wire import agent_messages as am
from shoal.wire.messages import WireError


@dataclass(slots=True)
class FleetState:
    epoch: str
    timing: Timing = field(default_factory=Timing)
    agents: dict[str, Agent] = field(default_factory=dict)
    #: Agents prepare for warm starts as soon as they connect.
    warm: bool = False

    # Calls of the control plane

    def restore(
        self,
        agent: str,
        instance: str,
        nodes: tuple[am.NodeFacts, ...],
        now_s: float,
        *,
        leased: bool = True,
    ) -> None:
        """An earlier process of the control plane knew this agent. It may have granted a lease just now."""
        lease_s = max(self.timing.lease_s, self.timing.earlier_lease_s)
        until_s = now_s + self.timing.alive_s(lease_s) if leased else math.inf
        self.agents[agent] = Agent(agent, instance, nodes, Link.UNREACHABLE, until_s, leased)

    def start(self, order: am.Start) -> list[Effect]:
        agent = self._agent_of_node(order.node)
        if agent is None or agent.link is Link.LOST:
            why = f"node {order.node} is {'lost' if agent is not None else 'not known'}"
            return [WorkerExit(am.Exited(order.worker, why=why, began=False, node_lost=True))]
        assert order.worker not in agent.workers, order.worker
        agent.workers[order.worker] = Worker(order.node, order.directory, sent=agent.link is Link.CONNECTED)
        return self._order(agent, order)

    def adopt(
        self, worker: str, node: str, log_position: int, now_s: float, directory: str = ""
    ) -> list[Effect]:
        """An earlier process of the control plane started the worker. Call it before the first hello.

        If no agent is known to have the node, the agent with the node's name is expected to have it.
        """
        agent = self._agent_of_node(node)
        if agent is None:
            self.restore(node, ANY_INSTANCE, (), now_s)
            agent = self.agents[node]
        if agent.link is Link.LOST:
            return [WorkerExit(am.Exited(worker, why=f"its node {node} is lost", node_lost=True))]
        agent.workers[worker] = Worker(node, directory, log_position)
        return []

    def order(self, order: am.Stop | am.Suspend | am.Wake | am.Warn | am.Go) -> list[Effect]:
        agent = self.agent_of_worker(order.worker)
        if agent is None or agent.workers[order.worker].reported:
            return []
        if isinstance(order, am.Stop) and not agent.workers[order.worker].sent:
            return self._withdraw(agent, order.worker)
        return self._order(agent, order)

    def _withdraw(self, agent: Agent, name: str) -> list[Effect]:
        """The worker waits for the connection of its agent and shall not start any more."""
        del agent.workers[name]
        agent.outbox = {
            seq: order
            for seq, order in agent.outbox.items()
            if isinstance(order, am.WarmUp) or order.worker != name
        }
        why = "it was ended before it began"
        return [WorkerExit(am.Exited(name, why=why, began=False, told=True))]

    def take_port(self, node: str) -> int | None:
        """A free port of the node's machine. None if its agent has told of none."""
        agent = self._agent_of_node(node)
        return agent.ports.pop(0) if agent is not None and agent.ports else None

    def warm_up(self) -> list[Effect]:
        return [
            e for a in self.agents.values() if a.link is Link.CONNECTED for e in self._order(a, am.WarmUp())
        ]

    def agent_of_worker(self, worker: str) -> Agent | None:
        return next((a for a in self.agents.values() if worker in a.workers), None)

    def _agent_of_node(self, node: str) -> Agent | None:
        owners = (a for a in self.agents.values() if any(n.name == node for n in a.nodes))
        named = self.agents.get(node)
        return next(owners, named if named is not None and named.instance == ANY_INSTANCE else None)

    def _order(self, agent: Agent, order: am.Order) -> list[Effect]:
        command = self._queue(agent, order)
        return [Send(agent.name, command)] if agent.link is Link.CONNECTED else []

    def _queue(self, agent: Agent, order: am.Order) -> am.Command:
        command = am.Command(agent.next_seq, order)
        agent.outbox[command.seq] = order
        agent.next_seq += 1
        return command

    # Connections

    def hello(
        self,
        hello: am.AgentHello,
        instance: str,
        now_s: float,
        wall_s: float,
        *,
        credential: str = "",
        leased: bool = True,
    ) -> list[Effect]:
        """An agent that proved to be `instance` connects. `credential` is its own secret after a first join."""
        refusal = self._why_refuse(hello, instance, now_s)
        if refusal is not None:
            return [refusal]
        agent = self.agents.get(hello.agent)
        if agent is None:
            agent = Agent(hello.agent, instance, (), Link.UNREACHABLE, -math.inf)
            self.agents[hello.agent] = agent
        if agent.instance not in (ANY_INSTANCE, instance):
            self._drop_workers(agent)
        offered = {node.name for node in hello.nodes}
        gone = [node.name for node in agent.nodes if node.name not in offered]
        for other in self.agents.values():  # a lost agent of another name may have had one of these nodes
            other.nodes = tuple(node for node in other.nodes if node.name not in offered)
        agent.instance, agent.run, agent.nodes, agent.leaves = instance, hello.run, hello.nodes, None
        agent.versions, agent.leased, agent.rivals = hello.versions, leased, {}
        agent.told_clocks(hello.clock_s, hello.wall_s, wall_s)
        agent.link, agent.heard_s = Link.CONNECTED, now_s
        self._grant_lease(agent, now_s)
        effects: list[Effect] = [Accept(agent.name, instance, hello.nodes)]
        effects += [NodeLost(name, "its agent no longer offers it") for name in gone]
        effects += self._compare_workers(agent, hello)
        if self.warm:
            self._queue(agent, am.WarmUp())
        effects.append(Send(agent.name, self._welcome(agent, credential)))
        for worker in agent.workers.values():
            worker.sent = True
        effects += [Send(agent.name, am.Command(seq, order)) for seq, order in agent.outbox.items()]
        return effects + self._up(agent)

    def _up(self, agent: Agent) -> list[Effect]:
        """Its GPUs can be given to workers, unless one that nobody knows may still use them."""
        return [] if agent.unknown else [NodeUp(node_info(node, agent)) for node in agent.nodes]

    def _welcome(self, agent: Agent, credential: str) -> am.Welcome:
        return am.Welcome(
            epoch=self.epoch,
            lease_s=self.timing.lease_s if agent.leased else None,
            heartbeat_s=self.timing.heartbeat_s,
            logs={name: worker.log_position for name, worker in agent.workers.items()},
            credential=credential,
        )

    def _grant_lease(self, agent: Agent, now_s: float) -> None:
        lease_s = self.timing.alive_s(self.timing.lease_s) if agent.leased else math.inf
        agent.alive_until_s = max(agent.alive_until_s, now_s + lease_s)

    def _why_refuse(self, hello: am.AgentHello, instance: str, now_s: float) -> Refuse | None:
        if hello.protocol != am.AGENT_PROTOCOL:
            theirs = f"Shoal {hello.versions.get('shoal', 'of another version')} (protocol {hello.protocol})"
            ours = f"{__version__} (protocol {am.AGENT_PROTOCOL})"
            return Refuse(f"the agent runs {theirs}, the server {ours}: {INSTALL}", final=True)
        for node in hello.nodes:
            owner = self._agent_of_node(node.name)
            if owner is not None and owner.name != hello.agent and owner.link is not Link.LOST:
                return Refuse(f"node {node.name} belongs to the agent {owner.name}")
        agent = self.agents.get(hello.agent)
        if agent is None:
            return None
        if agent.link is Link.CONNECTED and (agent.instance, agent.run) != (instance, hello.run):
            return self._refuse_rival(agent, hello.run, now_s)
        other = agent.instance not in (ANY_INSTANCE, instance)
        if other and agent.link is not Link.LOST and agent.may_have_live_workers:
            left_s = max(agent.alive_until_s - now_s, 0.0)
            until = f"for {math.ceil(left_s)} s" if math.isfinite(left_s) else "until it returns"
            return Refuse(
                f"workers of another agent named {hello.agent} may be alive {until}: wait, or use another --name"
            )
        return None

    def _refuse_rival(self, agent: Agent, run: str, now_s: float) -> Refuse:
        """Refuse a second agent of this name.

        The open connection may be left from before its machine crashed, so the refusal is final only if messages still
        arrive on it.
        """
        if len(agent.rivals) >= MOST_RIVALS:
            agent.rivals.clear()
        since_s = agent.rivals.setdefault(run, now_s)
        is_alive = agent.heard_s >= since_s + self.timing.heartbeat_s
        why = f"another agent named {agent.name} is connected: give this one another --name"
        return Refuse(why, final=is_alive)

    def _compare_workers(self, agent: Agent, hello: am.AgentHello) -> list[Effect]:
        """Compare the workers that the agent has with those that it should have."""
        has = set(hello.workers)
        done = hello.done if hello.epoch == self.epoch else 0
        agent.outbox = {
            seq: order
            for seq, order in agent.outbox.items()
            if seq > done and not (isinstance(order, am.Start) and order.worker in has)
        }
        to_start = {order.worker for order in agent.outbox.values() if isinstance(order, am.Start)}
        effects: list[Effect] = []
        for name, worker in list(agent.workers.items()):
            if name not in has and name not in to_start:
                del agent.workers[name]
                if not worker.reported:
                    why = "its agent does not have it"
                    effects.append(WorkerExit(worker.exited or am.Exited(name, why=why, began=False)))
        agent.unknown = has - set(agent.workers)
        for name in sorted(agent.unknown):
            self._queue(agent, am.Stop(name, kill=True))
        if agent.unknown:
            effects.append(EndsUnknown(agent.name, tuple(sorted(agent.unknown))))
        return effects

    def _drop_workers(self, agent: Agent) -> None:
        """A new machine takes over the name. None of the old workers is alive, and all were reported."""
        assert not agent.may_have_live_workers or agent.link is Link.LOST
        agent.workers, agent.outbox = {}, {}

    def disconnected(self, name: str, why: str, now_s: float) -> list[Effect]:
        agent = self.agents[name]
        if agent.link is not Link.CONNECTED:
            return []
        agent.link = Link.UNREACHABLE
        agent.usage, agent.ports = {}, []
        effects: list[Effect] = [NodeUnreachable(node.name, why) for node in agent.nodes]
        # These have ended for certain. Their output follows if the agent returns.
        for worker in agent.workers.values():
            if worker.exited is not None:
                effects += self._report(worker, worker.exited)
        if agent.leaves is not None and not agent.may_have_live_workers:
            effects += self._lose(agent, agent.leaves[1])
        return effects

    def tick(self, now_s: float) -> list[Effect]:
        effects: list[Effect] = []
        for agent in self.agents.values():
            if agent.link is Link.CONNECTED and now_s - agent.heard_s > self.timing.silence_s:
                why = f"no message for {self.timing.silence_s:.0f} s"
                effects += [Cut(agent.name, why), *self.disconnected(agent.name, why, now_s)]
            if agent.link is Link.UNREACHABLE and now_s >= agent.alive_until_s:
                effects += self._lose(agent, "its agent did not return before its lease ended")
        return effects

    def leaving(self, name: str, in_s: float, why: str, now_s: float) -> list[Effect]:
        """The agent's machine will be taken away in `in_s` seconds."""
        agent = self.agents[name]
        agent.leaves = (now_s + in_s, why)
        return [NodeLeaving(node.name, in_s, why) for node in agent.nodes]

    def stays(self, name: str) -> list[Effect]:
        """The agent's machine will not be taken away after all."""
        agent = self.agents[name]
        agent.leaves = None
        return [NodeLeaving(node.name, None, "") for node in agent.nodes]

    def fenced(self, name: str, why: str) -> list[Effect]:
        """Somebody else has ended all processes of the agent and its workers."""
        agent = self.agents.get(name)
        if agent is None or agent.link is Link.LOST:
            return []
        cut: list[Effect] = [Cut(name, why)] if agent.link is Link.CONNECTED else []
        return cut + self._lose(agent, why)

    def excuse(self, late_s: float) -> None:
        """The control plane itself was suspended or starved for so long: the agents were not silent."""
        for agent in self.agents.values():
            agent.heard_s += late_s
            agent.rivals = {run: since_s + late_s for run, since_s in agent.rivals.items()}

    def _lose(self, agent: Agent, why: str) -> list[Effect]:
        agent.link, agent.outbox = Link.LOST, {}
        effects: list[Effect] = []
        for name, worker in agent.workers.items():
            if not worker.reported:
                lost = am.Exited(name, why=f"node lost: {why}", began=worker.sent, node_lost=True)
                effects += self._report(worker, worker.exited or lost)
        agent.workers = {}
        return effects + [NodeLost(node.name, why) for node in agent.nodes]

    # Messages

    def received(self, name: str, message: am.AgentMessage, now_s: float, wall_s: float) -> list[Effect]:
        agent = self.agents[name]
        agent.heard_s = now_s
        if isinstance(message, am.Renew):
            agent.told_clocks(message.clock_s, message.wall_s, wall_s)
            self._grant_lease(agent, now_s)
            return [Send(name, am.Renewed(message.clock_s))]
        if isinstance(message, am.Ack):
            agent.outbox = {seq: order for seq, order in agent.outbox.items() if seq > message.done}
            return []
        if isinstance(message, am.Exited):
            return self._exited(agent, message)
        if isinstance(message, am.LogChunk):
            return self._log_chunk(agent, message)
        if isinstance(message, am.UsageReport):
            agent.usage = {(u.node, u.gpu): u for u in message.gpus}
            return []
        if isinstance(message, am.Ports):
            agent.ports = list(message.free)
            return []
        if isinstance(message, am.Leaving):
            return self.leaving(name, message.in_s, message.why, now_s)
        raise WireError(f"an agent does not send {type(message).__name__}")

    def _exited(self, agent: Agent, exited: am.Exited) -> list[Effect]:
        worker = agent.workers.get(exited.worker)
        if worker is None:  # it was killed because nobody wanted it
            effects = self._order(agent, am.Forget(exited.worker))
            if exited.worker in agent.unknown:
                agent.unknown.remove(exited.worker)
                effects += self._up(agent)
            return effects
        worker.exited = exited
        return self._finish(agent, exited.worker, worker)

    def _log_chunk(self, agent: Agent, chunk: am.LogChunk) -> list[Effect]:
        worker = agent.workers.get(chunk.worker)
        if worker is None:
            return []
        if chunk.previous != worker.log_position or chunk.position < chunk.previous:
            raise WireError(
                f"output of {chunk.worker} at {chunk.previous} does not follow {worker.log_position}"
            )
        worker.log_position = chunk.position + len(chunk.data)
        ahead_s = chunk.stamps_ahead_s + agent.lease_clock_offset_s
        effects: list[Effect] = [
            AppendLog(chunk.worker, worker.directory, chunk.position, chunk.data, ahead_s),
            Send(agent.name, am.LogAck(chunk.worker, worker.log_position)),
        ]
        return effects + self._finish(agent, chunk.worker, worker)

    def _finish(self, agent: Agent, name: str, worker: Worker) -> list[Effect]:
        """Report the worker's end once its output is complete: who follows the output sees all of it."""
        if worker.exited is None or worker.log_position < worker.exited.log_end:
            return []
        effects = self._report(worker, worker.exited)
        del agent.workers[name]
        return effects + self._order(agent, am.Forget(name))

    def _report(self, worker: Worker, exited: am.Exited) -> list[Effect]:
        if worker.reported:
            return []
        worker.reported = True
        return [WorkerExit(exited)]
