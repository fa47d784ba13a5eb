"""The nodes that the server knows: what they have, and whether jobs may use them.

A node goes by its name, in the store as well. Its index is its position in the table, which only grows while a server
runs: nodes may leave and return in any order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from shoal.core.cluster import Node
from shoal.executors.base import NodeInfo

KEY = "nodes"
TO_COME = "gpus_to_come"
NOT_YET = "its agent has not connected since the server started"
#: What the scheduler has while no node is known. Nothing can be placed on it.
NO_NODE = Node("no node has joined", 64, "gpu")


class Link(StrEnum):
    UP = "up"
    UNREACHABLE = "unreachable"  # no connection; its workers may be alive
    LOST = "lost"  # none of its workers can be alive


@dataclass(slots=True)
class NodeRecord:
    """What is known of a node besides its facts."""

    link: Link = Link.UNREACHABLE
    #: Why there is no connection.
    why: str = ""
    #: It has been unreachable for so long that its jobs go on elsewhere.
    given_up: bool = False
    #: When its machine is taken away, by the server's clock, and why.
    leaves: tuple[float, str] | None = None
    drained: bool = False
    #: Why its engine does not want it to be used.
    kept_off: str = ""
    #: Somebody removed it. It comes back if its agent joins again.
    removed: bool = False

    @property
    def state(self) -> str:
        """One word for people."""
        if self.link is not Link.UP:
            return self.link.value
        if self.leaves is not None:
            return "leaving"
        if self.kept_off:
            return "kept off"
        return "drained" if self.drained else "ready"

    @property
    def reason(self) -> str:
        """Why no job gets its GPUs; empty if jobs do, or if a person drained it."""
        if self.link is not Link.UP:
            return self.why
        return self.leaves[1] if self.leaves is not None else self.kept_off

    @property
    def blocked(self) -> str:
        """Why no job gets its GPUs whatever its engine says; empty: jobs do."""
        if self.removed:
            return "somebody removed it"
        if self.link is Link.LOST or self.given_up:
            return self.why or "its agent is not connected"
        if self.leaves is not None:
            return self.leaves[1] or "it is leaving"
        return "somebody drained it" if self.drained else ""

    @property
    def is_usable(self) -> bool:
        return not (self.blocked or self.kept_off)


class NodeTable:
    def __init__(
        self,
        order: Sequence[str],
        present: Iterable[NodeInfo],
        awaited: Iterable[NodeInfo],
        drained: Iterable[str],
        to_come: Mapping[str, int] | None = None,
    ) -> None:
        """`order`: the names of the last server's nodes. Workers can be started on those that are `present`.

        `to_come`: the most GPUs of each type that further machines of an engine could have.
        """
        self.to_come = dict(to_come or {})
        present, awaited = list(present), list(awaited)
        found = {info.name: info for info in (*awaited, *present)}
        names = [*(name for name in order if name in found), *(name for name in found if name not in order)]
        #: By index. Others may keep this list: it changes in place.
        self.infos: list[NodeInfo] = [found[name] for name in names]
        self.records = [NodeRecord(why=NOT_YET) for _ in names]
        self._index = {name: i for i, name in enumerate(names)}
        #: Indexes of the nodes that no job may use. Others may keep this set: it changes in place.
        self.out_of_use: set[int] = set()
        #: Those whose machine will be taken away. Processes that cannot move run there until the end.
        self.leaving: set[int] = set()
        for info in present:
            self.up(info)
        for name in drained:
            if name in self._index:
                self.records[self._index[name]].drained = True
        for i in range(len(self.infos)):
            self.refresh(i)

    def __len__(self) -> int:
        return len(self.infos)

    def find(self, name: str) -> int | None:
        return self._index.get(name)

    def up(self, info: NodeInfo) -> NodeInfo | None:
        """The node is there. Returns what was known of it before; None: it is new."""
        index = self._index.get(info.name)
        if index is None:
            index = self._index[info.name] = len(self.infos)
            self.infos.append(info)
            self.records.append(NodeRecord(Link.UP))
            return None
        before, self.infos[index] = self.infos[index], info
        record = self.records[index]
        record.link, record.why, record.given_up, record.leaves = Link.UP, "", False, None
        record.removed = False
        return before

    def refresh(self, index: int) -> bool:
        """Whether the node has come into use or gone out of use."""
        was_out = index in self.out_of_use
        (self.leaving.discard if self.records[index].leaves is None else self.leaving.add)(index)
        if self.records[index].is_usable:
            self.out_of_use.discard(index)
        else:
            self.out_of_use.add(index)
        return was_out is (index not in self.out_of_use)

    # -- what others see ---------------------------------------------------------------------------

    @property
    def for_cluster(self) -> tuple[Node, ...]:
        found = tuple(Node(n.name, n.gpus, n.gpu_type, n.rack, n.domain) for n in self.infos)
        # A job may need more than there is now. The scheduler takes it in, and it waits for machines.
        later = tuple(Node(f"{gpu_type} to come", gpus, gpu_type) for gpu_type, gpus in self.to_come.items())
        return found + later or (NO_NODE,)

    @property
    def out_of_cluster(self) -> set[int]:
        """The nodes of `for_cluster` that give no GPUs."""
        return self.out_of_use | set(range(len(self.infos), len(self.for_cluster)))

    @property
    def drained_names(self) -> list[str]:
        return sorted(info.name for info, record in zip(self.infos, self.records) if record.drained)

    @property
    def gpus(self) -> int:
        """GPUs of all nodes that are not lost."""
        return sum(
            info.gpus
            for info, record in zip(self.infos, self.records)
            if record.link is not Link.LOST and not record.removed
        )

    @property
    def up_names(self) -> set[str]:
        return {info.name for info, record in zip(self.infos, self.records) if record.link is Link.UP}

    @property
    def names(self) -> list[str]:
        """For the store: the order of the nodes."""
        return [info.name for info in self.infos]

    # -- targets by name, for the store ------------------------------------------------------------

    def named(self, target: Mapping[int, int]) -> list[list[Any]]:
        return sorted([self.infos[node].name if node < len(self) else node, n] for node, n in target.items())

    def indexed(self, saved: Iterable[Sequence[Any]]) -> dict[int, int]:
        """A target from the store. Stores of earlier versions have indexes instead of names."""
        found: dict[int, int] = {}
        for node, gpus in saved:
            index = node if isinstance(node, int) else self._index.get(node)
            if index is not None:
                found[index] = int(gpus)
        return found
