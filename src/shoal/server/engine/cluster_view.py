"""The driver's view of the control plane: its agents, nodes, jobs and join tokens. Implements `ClusterPort`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from shoal.agents.fleet_records import Agent, Link
from shoal.engines.capacity import Demand
from shoal.server.engine.demand import DemandLoop, demand_of
from shoal.server.engine.port import UNTYPED, AgentSeen
from shoal.server.loop.devices import Devices
from shoal.server.loop.node_table import Link as NodeLink
from shoal.server.loop.node_table import NodeTable
from shoal.server.loop.node_watch import NodeWatch
from shoal.server.loop.outbox import Outbox


class ViewLoop(DemandLoop, Protocol):
    """What it needs of the control loop."""

    @property
    def table(self) -> NodeTable: ...

    @property
    def devices(self) -> Devices: ...

    @property
    def node_watch(self) -> NodeWatch: ...

    @property
    def outbox(self) -> Outbox: ...

    def settle_soon(self) -> None: ...

    def expect_gpus(self, to_come: Mapping[str, int]) -> None: ...


class ViewAgents(Protocol):
    """What it needs of the agents and their join tokens."""

    @property
    def address(self) -> str: ...

    def known(self) -> Mapping[str, Agent]:
        """The agents on other machines, by name."""

    def leaving(self, agent: str, in_s: float, why: str) -> None: ...

    def stays(self, agent: str) -> None: ...

    def fenced(self, agent: str, why: str) -> None: ...

    def make_token(self, lifetime_s: float) -> tuple[str, str]: ...

    def drop_token(self, token_id: str) -> None: ...


class ClusterView:
    def __init__(self, loop: ViewLoop, agents: ViewAgents) -> None:
        self._loop, self._agents = loop, agents
        self.leaving, self.stays, self.fenced = agents.leaving, agents.stays, agents.fenced
        self.make_token, self.drop_token = agents.make_token, agents.drop_token

    @property
    def address(self) -> str:
        return self._agents.address

    def agents(self) -> Mapping[str, AgentSeen]:
        return {name: self._seen(agent) for name, agent in self._agents.known().items()}

    def _seen(self, agent: Agent) -> AgentSeen:
        table = self._loop.table
        indexes = [i for node in agent.nodes if (i := table.find(node.name)) is not None]
        records = [table.records[i] for i in indexes]
        usable = [i for i in indexes if not table.records[i].blocked]
        leaves_s = [record.leaves[0] for record in records if record.leaves is not None]
        return AgentSeen(
            agent.name,
            connected=agent.link is Link.CONNECTED,
            may_have_workers=agent.may_have_live_workers,
            gpus=sum(table.infos[i].gpus for i in usable or indexes),
            used_gpus=sum(max(self._loop.devices.used_of(i), self._given_gpus(i)) for i in indexes),
            blocked="" if usable or not records else records[0].blocked,
            drained=bool(records) and all(record.drained for record in records),
            leaves_in_s=min(leaves_s) - self._loop.now_s() if leaves_s else None,
        )

    def _given_gpus(self, index: int) -> int:
        """GPUs of a node that jobs shall have. Their workers may not have started yet."""
        return sum(job.wanted.get(index, 0) for job in self._loop.jobs.values())

    def demand(self, most_gpus: int) -> Sequence[Demand]:
        return demand_of(self._loop, most_gpus)

    def expect(self, most_gpus: Mapping[str, int]) -> None:
        self._loop.expect_gpus(
            {t: n for t, most in most_gpus.items() if (n := most - self._present_gpus(t)) > 0}
        )
        self._loop.settle_soon()

    def _present_gpus(self, gpu_type: str) -> int:
        table = self._loop.table
        return sum(
            info.gpus
            for info, record in zip(table.infos, table.records)
            if record.link is not NodeLink.LOST and gpu_type in (info.gpu_type, UNTYPED)
        )

    def keep_off(self, agents: Mapping[str, str]) -> None:
        known = self._agents.known()
        nodes = {n.name: why for a, why in agents.items() if a in known for n in known[a].nodes}
        self._loop.node_watch.keep_off(nodes)
        self._loop.settle_soon()

    def record(self, type: str, message: str, **data: Any) -> None:
        self._loop.outbox.event(type, message, None, **data)
        self._loop.settle_soon()
