"""Nodes: what they have, which jobs are on them, and taking one out of use."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from shoal.core.errors import did_you_mean
from shoal.executors.base import NodeInfo
from shoal.server.api import models as m
from shoal.server.loop.clock import as_time
from shoal.server.loop.devices import Devices
from shoal.server.loop.live_job import LiveJob, job_ref
from shoal.server.loop.node_table import NodeTable
from shoal.server.loop.node_watch import NodeWatch
from shoal.server.services.engine_view import EngineView
from shoal.server.services.errors import NotFound
from shoal.server.services.naming import printable
from shoal.server.store.store import Store

MOST_DEVICES = 64


class NodeLoop(Protocol):
    """What the services of nodes need of the control loop. Nodes go by index."""

    @property
    def nodes(self) -> Sequence[NodeInfo]: ...

    @property
    def table(self) -> NodeTable: ...

    @property
    def devices(self) -> Devices: ...

    @property
    def jobs(self) -> Mapping[int, LiveJob]: ...

    def now_s(self) -> float: ...

    @property
    def node_watch(self) -> NodeWatch: ...

    def lose_node(self, node: int) -> None: ...

    def node_back(self, node: int) -> None: ...


class Nodes:
    def __init__(
        self,
        loop: NodeLoop,
        store: Store,
        engine: EngineView,
        warnings: Callable[[], Mapping[str, Sequence[str]]] = dict,
    ) -> None:
        """`warnings`: what is wrong with machines, by node."""
        self._loop, self._store, self._engine, self._warnings = loop, store, engine, warnings

    def all(self) -> list[m.NodeStatus]:
        records, warnings = self._loop.table.records, self._warnings()
        return [self._status(i, warnings) for i, record in enumerate(records) if not record.removed]

    def _status(self, index: int, warnings: Mapping[str, Sequence[str]]) -> m.NodeStatus:
        node, record = self._loop.nodes[index], self._loop.table.records[index]
        return m.NodeStatus(
            name=node.name,
            gpu_type=node.gpu_type,
            gpus=node.gpus,
            used=self._loop.devices.used_of(index),
            virtual=node.virtual,
            devices=list(node.devices)[:MOST_DEVICES],
            state=record.state,
            why=record.reason or None,
            leaves_at=None if record.leaves is None else as_time(record.leaves[0]),
            address=node.address,
            engine=self._engine.of_node(node.name),
            warnings=list(warnings.get(node.name, ())),
            rack=node.rack,
            domain=node.domain,
        )

    def show(self, name: str, only: str | None) -> m.Node:
        """One node and its jobs. `only`: the user whose jobs may be named; None for all."""
        index = self._find(name)
        on_it = [
            job
            for job in self._loop.jobs.values()
            if any(w.device[0] == index and w.holds_gpu for w in job.workers.values())
        ]
        refs = [job_ref(job, only in (None, job.user)) for job in on_it]
        return m.Node(**self._status(index, self._warnings()).model_dump(), jobs=refs)

    def drain(self, name: str, actor: str) -> None:
        """Take a node out of use: its jobs move to others or wait."""
        node = self._find(name)
        if not self._loop.table.records[node].drained:
            drained = {*self._loop.table.drained_names, self._loop.nodes[node].name}
            self._record(drained, "node.drained", node, actor)
            self._loop.lose_node(node)

    def uncordon(self, name: str, actor: str) -> None:
        node = self._find(name)
        if self._loop.table.records[node].drained:
            drained = set(self._loop.table.drained_names) - {self._loop.nodes[node].name}
            self._record(drained, "node.uncordoned", node, actor)
            self._loop.node_back(node)

    def forget(self, name: str) -> None:
        """Show a node that is lost no longer."""
        self._loop.node_watch.remove(self._find(name))

    def _record(self, drained: set[str], type: str, node: int, actor: str) -> None:
        with self._store.change(self._loop.now_s(), actor=actor) as change:
            change.put("drained", sorted(drained))
            name = self._loop.nodes[node].name
            change.event(type, f"{name} was {type.split('.')[1]} by {actor}", data={"node": name})

    def _find(self, name: str) -> int:
        index = self._loop.table.find(name)
        if index is None or self._loop.table.records[index].removed:
            names = [status.name for status in self.all()]
            hint = did_you_mean(name, names) if len(names) < 1000 else None
            raise NotFound(f"there is no node {printable(name)!r}", hint)
        return index
