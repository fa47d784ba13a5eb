"""Nodes: what they have, which jobs are on them, and taking one out of use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Protocol

from shoal.core.errors import did_you_mean
from shoal.executors.base import NodeInfo
from shoal.server.api import models as m
from shoal.server.loop.devices import Devices
from shoal.server.loop.live_job import LiveJob, job_ref
from shoal.server.services.errors import NotFound
from shoal.server.services.naming import printable
from shoal.server.store.store import Store

MOST_DEVICES = 64


class NodeLoop(Protocol):
    """What the services of nodes need of the control loop. Nodes go by index."""

    @property
    def nodes(self) -> Sequence[NodeInfo]: ...

    @property
    def drained(self) -> Set[int]: ...

    @property
    def devices(self) -> Devices: ...

    @property
    def jobs(self) -> Mapping[int, LiveJob]: ...

    def now_s(self) -> float: ...

    def lose_node(self, node: int) -> None: ...

    def node_back(self, node: int) -> None: ...


class Nodes:
    def __init__(self, loop: NodeLoop, store: Store) -> None:
        self._loop, self._store = loop, store

    def all(self) -> list[m.NodeStatus]:
        return [self._status(i) for i in range(len(self._loop.nodes))]

    def _status(self, index: int) -> m.NodeStatus:
        node = self._loop.nodes[index]
        return m.NodeStatus(
            name=node.name,
            gpu_type=node.gpu_type,
            gpus=node.gpus,
            used=self._loop.devices.used_of(index),
            virtual=node.virtual,
            devices=list(node.devices)[:MOST_DEVICES],
            state="drained" if index in self._loop.drained else "ready",
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
        return m.Node(**self._status(index).model_dump(), jobs=refs)

    def drain(self, name: str, actor: str) -> None:
        """Take a node out of use: its jobs move to others or wait."""
        node = self._find(name)
        if node not in self._loop.drained:
            self._record({*self._loop.drained, node}, "node.drained", node, actor)
            self._loop.lose_node(node)

    def uncordon(self, name: str, actor: str) -> None:
        node = self._find(name)
        if node in self._loop.drained:
            self._record(set(self._loop.drained) - {node}, "node.uncordoned", node, actor)
            self._loop.node_back(node)

    def _record(self, drained: set[int], type: str, node: int, actor: str) -> None:
        nodes = self._loop.nodes
        with self._store.change(self._loop.now_s(), actor=actor) as change:
            change.put("drained", sorted(nodes[i].name for i in drained))
            name = nodes[node].name
            change.event(type, f"{name} was {type.split('.')[1]} by {actor}", data={"node": name})

    def _find(self, name: str) -> int:
        names = [n.name for n in self._loop.nodes]
        if name not in names:
            hint = did_you_mean(name, names) if len(names) < 1000 else None
            raise NotFound(f"there is no node {printable(name)!r}", hint)
        return names.index(name)
