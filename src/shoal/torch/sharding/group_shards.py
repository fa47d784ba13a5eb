"""A sharded model in groups of workers: each worker has one shard of it, as others of other groups do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from shoal.torch.sharding import private
from shoal.torch.sharding.moving import as_bytes, slot_shapes
from shoal.torch.sharding.private import Collectives, Sharded
from shoal.torch.sharding.reshard import part_rows, span
from shoal.torch.sharding.shards import Shards
from torch import Tensor

PARAM = ""  # among the names of optimizer states: the parameter itself


class GroupShards(Shards):
    """`members` are the workers of this worker's group, by shard."""

    #: Which shard of the model this worker has.
    shard = 0
    #: Rows of another shard, received before a switch and used after it: (rows, optimizer states) of each parameter.
    fetched: list[tuple[Tensor, dict[str, Any]]] | None = None

    def scatter(self, everyone: Collectives, members: Sequence[str], group: Collectives, shard: int) -> bool:
        """The first worker has all rows. Every worker takes those of its shard, tensor by tensor. False: it broke."""
        private.release(self.model)
        self.mesh = private.make_mesh(group, self.mesh.device_type, before=self.mesh)
        for sharded in self.all():
            slots = self.slots(sharded)
            taken: dict[str, Tensor] = {}
            for name in (None, *slot_shapes(slots, sharded.shape)):
                whole = sharded.local if name is None else private.local_of(slots[name])
                if everyone.rank != 0:
                    whole = whole.new_empty(tuple(sharded.shape))
                if not everyone.broadcast(whole.detach(), 0):
                    return False
                taken[name or PARAM] = self._part(sharded, whole.detach(), len(members), shard)
            self._set(sharded, taken.pop(PARAM), {**slots, **taken}, len(members), shard)
        self._enter_group(members, group, shard)
        return True

    def assume(self, members: Sequence[str], group: Collectives, shard: int) -> None:
        """Take the layout of a shard with rows of any value: they are about to be received."""
        private.release(self.model)
        self.mesh = private.make_mesh(group, self.mesh.device_type, before=self.mesh)
        for sharded in self.all():
            local = sharded.local
            part = part_rows(sharded.rows, len(members))
            padded = torch.zeros(part, *sharded.shape[1:], dtype=local.dtype, device=local.device)
            self._set(sharded, padded, {}, len(members), shard)
        self._enter_group(members, group, shard)

    def fetch(
        self,
        everyone: Collectives,
        members: Sequence[str],
        sources: dict[str, str],
        shards: dict[str, int],
        size: int,
    ) -> bool:
        """Give workers in `sources` the rows of another shard, which their source has. False: it broke.

        They keep their own until the switch.
        """
        fetched: list[tuple[Tensor, dict[str, Any]]] = []
        for sharded in self.all():
            slots = self.slots(sharded)
            shapes = slot_shapes(slots, sharded.shape)
            found: dict[str, Tensor] = {}
            for name in (None, *shapes):
                local = (sharded.local if name is None else private.local_of(slots[name])).detach()
                rows = {w: _rows(sharded, size, shard) for w, shard in shards.items()}
                sent = [local if sources.get(w) == self.me else local[:0] for w in members]
                row_bytes = local[:0].new_empty(1, *sharded.shape[1:]).nbytes
                mine = [rows[self.me] * row_bytes if sources.get(self.me) == w else 0 for w in members]
                flat = torch.cat([as_bytes(part) for part in sent])
                got = everyone.exchange(flat, [as_bytes(part).numel() for part in sent], mine)
                if got is None:
                    return False
                if self.me in shards:
                    part = torch.zeros(
                        part_rows(sharded.rows, size),
                        *sharded.shape[1:],
                        dtype=local.dtype,
                        device=local.device,
                    )
                    as_bytes(part[: rows[self.me]]).copy_(got)
                    found[name or PARAM] = part
            if self.me in shards:
                fetched.append((found.pop(PARAM), {**slots, **found}))
        self.fetched = fetched if self.me in shards else None
        return True

    def take_fetched(self, members: Sequence[str], group: Collectives, shard: int) -> None:
        """Use the rows of the other shard."""
        fetched, self.fetched = self.fetched, None
        assert fetched is not None
        private.release(self.model)
        self.mesh = private.make_mesh(group, self.mesh.device_type, before=self.mesh)
        for sharded, (padded, slots) in zip(self.all(), fetched, strict=True):
            self._set(sharded, padded, slots, len(members), shard)
        self._enter_group(members, group, shard)

    @staticmethod
    def _part(sharded: Sharded, whole: Tensor, size: int, shard: int) -> Tensor:
        """The rows of a shard, padded as torch does."""
        low, high = span(sharded.rows, size, shard)
        padded = torch.zeros(
            part_rows(sharded.rows, size), *sharded.shape[1:], dtype=whole.dtype, device=whole.device
        )
        padded[: high - low] = whole[low:high]
        return padded

    def _set(self, sharded: Sharded, padded: Tensor, slots: dict[str, Any], size: int, shard: int) -> None:
        """Use these rows, and these optimizer states: padded rows, or anything of another shape."""
        rows = _rows(sharded, size, shard)
        private.relayout(sharded, self.mesh, padded, rows)
        self.optimizer.state.pop(sharded.param, None)
        if slots:
            self.optimizer.state[sharded.param] = {
                name: private.like(sharded, value.narrow(0, 0, rows)) if _is_part(value, padded) else value
                for name, value in slots.items()
            }

    def _enter_group(self, members: Sequence[str], group: Collectives, shard: int) -> None:
        self._use(group)
        self.members, self.shard = tuple(members), shard


def _rows(sharded: Sharded, size: int, shard: int) -> int:
    low, high = span(sharded.rows, size, shard)
    return high - low


def _is_part(value: Any, padded: Tensor) -> bool:
    """Whether it has a row for each row of the shard."""
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape == padded.shape
