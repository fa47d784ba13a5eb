"""What happens when a node joins, changes, cannot be reached, is lost, leaves or is drained."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Protocol

from shoal.core.events import Event, NodeBack
from shoal.core.events import NodeLost as NodeGone
from shoal.core.words import counted
from shoal.executors.base import NodeChange, NodeInfo, NodeLeaving, NodeLost, NodeUnreachable, NodeUp
from shoal.server.loop.devices import Devices
from shoal.server.loop.node_table import KEY, Link, NodeRecord, NodeTable
from shoal.server.loop.outbox import Outbox

#: How long jobs keep the GPUs of a node whose agent is not connected: it may have been restarted.
GIVE_UP_S = 5.0
#: The same after a start of the server, when all agents have to connect again.
FIRST_GIVE_UP_S = 10.0


class WatchLoop(Protocol):
    """What it needs of the control loop."""

    def now_s(self) -> float: ...

    def take_in(self, *events: Event) -> None: ...

    def post(self, *events: Event) -> None: ...

    def nodes_changed(self, replaced: set[str]) -> None:
        """Decide for the new set of nodes. `replaced`: these have other GPUs under the same name."""

    def settle_soon(self) -> None: ...


class NodeWatch:
    def __init__(self, loop: WatchLoop, table: NodeTable, devices: Devices, outbox: Outbox) -> None:
        self._loop, self.table, self._devices, self._outbox = loop, table, devices, outbox
        self._timers: dict[int, asyncio.TimerHandle] = {}

    def start(self) -> None:
        """Nodes of the last server that are not there yet get some time."""
        for index, record in enumerate(self.table.records):
            if record.link is Link.UNREACHABLE:
                self._give_up_in(index, FIRST_GIVE_UP_S)
        self._outbox.setting(KEY, self.table.names)

    def close(self) -> None:
        for timer in self._timers.values():
            timer.cancel()

    def take(self, change: NodeChange) -> None:
        """The executor reports a change."""
        if isinstance(change, NodeUp):
            self._up(change.node)
        else:
            index = self.table.find(change.node)
            if index is not None:
                self._change(index, change)
        self._loop.settle_soon()

    def _up(self, info: NodeInfo) -> None:
        before = self.table.up(info)
        index = self.table.find(info.name)
        assert index is not None
        self._cancel_timer(index)
        self._devices.set_gpus(index, info.gpus)
        if before is None:
            self._outbox.setting(KEY, self.table.names)
        what = f"{info.name} is up with {counted(info.gpus, 'GPU')} of type {info.gpu_type}"
        self._record("node.up", what, info.name, gpus=info.gpus, gpu_type=info.gpu_type)
        if before is None or _place(before) != _place(info):
            self.table.refresh(index)
            other_type = before is not None and before.gpu_type != info.gpu_type
            self._loop.nodes_changed({info.name} if other_type else set())
        else:
            self._use(index)

    def _change(self, index: int, change: NodeUnreachable | NodeLost | NodeLeaving) -> None:
        record, name = self.table.records[index], change.node
        if isinstance(change, NodeLeaving):
            self._leaving(record, change)
        elif isinstance(change, NodeLost):
            self._cancel_timer(index)
            record.link, record.why = Link.LOST, change.why
            self._record("node.lost", f"{name} is lost: {change.why}", name)
        else:
            record.link, record.why = Link.UNREACHABLE, change.why
            self._record("node.unreachable", f"{name} cannot be reached: {change.why}", name)
            self._give_up_in(index, GIVE_UP_S)
        self._use(index)

    def _leaving(self, record: NodeRecord, change: NodeLeaving) -> None:
        name = change.node
        if change.in_s is not None:
            record.leaves = (self._loop.now_s() + change.in_s, change.why)
            text = f"{name} leaves in {change.in_s:.0f} s: {change.why}"
            self._record("node.leaving", text, name, in_s=change.in_s)
        elif record.leaves is not None:
            record.leaves = None
            self._record("node.stays", f"{name} stays: its machine is not taken away", name)

    def _give_up_in(self, index: int, delay_s: float) -> None:
        self._cancel_timer(index)
        self._timers[index] = asyncio.get_running_loop().call_later(delay_s, self._give_up, index)

    def _cancel_timer(self, index: int) -> None:
        timer = self._timers.pop(index, None)
        if timer is not None:
            timer.cancel()

    def _give_up(self, index: int) -> None:
        self._timers.pop(index, None)
        self.table.records[index].given_up = True
        self._use(index)

    # -- what people and engines decide ------------------------------------------------------------

    def drain(self, index: int, drained: bool) -> None:
        """A person decided that, and the newest event of the store is the record of it."""
        self.table.records[index].drained = drained
        if self.table.refresh(index):
            self._loop.post(NodeGone(index) if drained else NodeBack(index))

    def keep_off(self, reasons: Mapping[str, str]) -> None:
        """Use these nodes no longer, each for a reason, and all others again."""
        for index, (info, record) in enumerate(zip(self.table.infos, self.table.records)):
            why = reasons.get(info.name, "")
            if record.kept_off != why:
                record.kept_off = why
                self._use(index)

    def remove(self, index: int) -> None:
        self.table.records[index].removed = True
        self._use(index)

    def _use(self, index: int) -> None:
        """Tell the scheduler if the node has come into use or gone out of use."""
        if self.table.refresh(index):
            out = index in self.table.out_of_use
            self._loop.take_in(NodeGone(index) if out else NodeBack(index))

    def _record(self, type: str, message: str, node: str, **data: object) -> None:
        self._outbox.event(type, message, None, node=node, **data)


def _place(info: NodeInfo) -> tuple[int, str, str, str]:
    """What the scheduler knows of a node."""
    return info.gpus, info.gpu_type, info.rack, info.domain
