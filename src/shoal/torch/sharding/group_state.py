"""The state of one worker of a shard group: its shard of all parameters, as a replicated model's state is streamed."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from shoal.torch.packing import alike
from shoal.torch.sharding import private
from shoal.torch.sharding.private import Sharded
from shoal.torch.sharding.shards import Shards
from shoal.torch.sharding.state import ShardedState
from shoal.torch.state import ModelState, StateBox
from shoal.wire.groups import group_line
from torch import Tensor


class GroupState(ShardedState):
    """`parameters` are this worker's rows. A newcomer gets those of its shard, piece by piece, from one that has it."""

    def __init__(self, shards: Shards, box: StateBox, size: int) -> None:
        super().__init__(shards, box)
        self._size = size
        self._sharded: dict[int, Sharded] = {}
        self.refresh()

    def refresh(self) -> None:
        """The layout has changed: the rows are other tensors."""
        found = list(self.shards.all())
        self.parameters = [s.local for s in found]
        self._sharded = {id(s.local): s for s in found}

    @property
    def trained(self) -> list[Tensor]:
        return [self._sharded[id(p)].param for p in self.parameters]

    def slots(self, param: Tensor) -> dict[str, Any]:
        held = self.shards.slots(self._sharded[id(param)])
        return {name: private.local_of(value) for name, value in held.items()}

    def _set_slots(self, param: Tensor, slots: dict[str, Any]) -> None:
        sharded = self._sharded[id(param)]
        self.optimizer.state.pop(sharded.param, None)
        if slots:
            self.optimizer.state[sharded.param] = {
                name: private.like(sharded, value) if alike(value, param) else value
                for name, value in slots.items()
            }

    def signature(self) -> tuple[str, ...]:
        return (*super().signature(), group_line(self._size))

    def describe(self, facts: dict[str, Any], whole: bool = True) -> bytes:
        """Without the optimizer's states: they come with the rows."""
        return ModelState.describe(self, facts, whole)

    def describe_all(self, facts: dict[str, Any]) -> bytes:
        return ShardedState.describe(self, facts)

    def digest(self, facts: Any = None) -> bytes:
        """SHA-256 over the digests of all shards of this worker's group: it is equal on all members."""
        own = torch.frombuffer(bytearray(ModelState.digest(self, facts)), dtype=torch.uint8)
        group = self.shards.collectives
        together = own.new_empty(group.size * own.numel())
        group.all_gather(together, own)
        return hashlib.sha256(bytes(together.tolist())).digest()
