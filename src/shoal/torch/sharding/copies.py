"""Copies of each worker's rows in the memory of its neighbour, so that a lost worker does not take its rows with it.

Every n steps each worker copies its rows and gives the copy to the next worker of the layout, too. When a worker is
lost, all return to the step of the copies. Cost: twice the memory of a worker's own rows with their optimizer state
(its own copy and its neighbour's), four times while they are renewed, and sending them once every n steps.

A worker may die while the copies are renewed. So the former copies are kept until an all-reduce has ended after the new
ones: it completes only if every worker has entered it, which it does with complete new copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from shoal.torch.sharding import private
from shoal.torch.sharding.moving import as_bytes, slot_shapes
from shoal.torch.sharding.private import Sharded
from shoal.torch.sharding.reshard import span
from shoal.torch.sharding.shards import Held, Shards
from torch import Tensor

STEP_BITS = 40


@dataclass(frozen=True, slots=True)
class Copies:
    """All of one step. The keys are the number of the parameter and the name of the optimizer state."""

    step: int
    number: int  # of later copies it is larger, also of those of the same step in another layout
    layout: tuple[str, ...]
    description: bytes
    rows: dict[str, dict[tuple[int, str | None], Tensor]]  # worker -> its rows


def number_of(step: int, generation: int) -> int:
    return (generation << STEP_BITS) + step


def holder(layout: Sequence[str], worker: str, survivors: Sequence[str]) -> str | None:
    """Who has the rows of `worker`: itself or its neighbour, whoever survives."""
    after = layout[(list(layout).index(worker) + 1) % len(layout)]
    return next((w for w in (worker, after) if w in survivors), None)


class Neighbours:
    def __init__(self, shards: Shards, every: int) -> None:
        self._shards, self.every = shards, every
        self.present: Copies | None = None
        self._former: Copies | None = None

    def refresh(self, step: int, generation: int, description: bytes) -> bool:
        """Copy this worker's rows here and to the next worker. False if it broke."""
        shards = self._shards
        layout = shards.members
        mine, before = layout.index(shards.me), layout[layout.index(shards.me) - 1]
        rows: dict[str, dict[tuple[int, str | None], Tensor]] = {w: {} for w in (shards.me, before)}
        number = 0
        for layer in shards.layers:
            keys = []
            for sharded in layer:
                slots = shards.slots(sharded)
                for name in (None, *slot_shapes(slots, sharded.shape)):
                    local = sharded.local if name is None else private.local_of(slots[name])
                    rows[shards.me][number, name] = local.detach().clone()
                    keys.append((number, name, sharded))
                number += 1
            if len(layout) > 1 and not self._exchange(keys, mine, rows[shards.me], rows[before]):
                return False
        self._former, self.present = (
            self.present,
            Copies(step, number_of(step, generation), layout, description, rows),
        )
        return self._confirm()

    def _confirm(self) -> bool:
        """Free the former copies once every worker has the new ones. False if it broke."""
        group = self._shards.collectives
        if group.size > 1 and not group.all_reduce(torch.zeros(1)):
            return False
        self._former = None
        return True

    def _exchange(
        self,
        keys: list[tuple[int, str | None, Sharded]],
        mine: int,
        own: dict[tuple[int, str | None], Tensor],
        other: dict[tuple[int, str | None], Tensor],
    ) -> bool:
        """Give the next worker this one's rows of a layer; receive those of the one before."""
        size = len(self._shards.members)
        after, before = (mine + 1) % size, (mine - 1) % size
        sent = torch.cat([as_bytes(own[number, name]) for number, name, _ in keys])
        shapes = []
        for number, name, sharded in keys:
            low, high = span(sharded.rows, size, before)
            shapes.append((high - low, *own[number, name].shape[1:]))
        lengths = [
            torch.Size(shape).numel() * own[number, name].element_size()
            for shape, (number, name, _) in zip(shapes, keys)
        ]
        sizes = [sum(lengths) if i == before else 0 for i in range(size)]
        received = self._shards.collectives.exchange(
            sent, [sent.numel() if i == after else 0 for i in range(size)], sizes
        )
        if received is None:
            return False
        for (number, name, _), shape, part in zip(keys, shapes, received.split(lengths)):
            other[number, name] = part.clone().view(own[number, name].dtype).view(shape)
        return True

    def use(self, number: int) -> Copies | None:
        """Those with this number. Later ones are not complete everywhere."""
        both = (self.present, self._former)
        found = next((c for c in both if c is not None and c.number == number), None)
        if found is not None:
            self.present, self._former = found, None
        return found

    def held(self, copies: Copies) -> Held:
        """The rows in these copies."""
        numbers = {id(s.param): i for i, s in enumerate(self._shards.all())}

        def found(sharded: Sharded, name: str | None) -> list[tuple[int, Tensor]]:
            key = (numbers[id(sharded.param)], name)
            return [
                (span(sharded.rows, len(copies.layout), copies.layout.index(worker))[0], rows[key])
                for worker, rows in copies.rows.items()
            ]

        return found
