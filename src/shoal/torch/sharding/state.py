"""The state of a sharded model: what a newcomer must know before rows move to it, and what a checkpoint contains."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Sequence
from typing import IO, Any

import torch
from shoal.torch.packing import Piece, dumps, place
from shoal.torch.sharding import private
from shoal.torch.sharding.moving import slot_shapes
from shoal.torch.sharding.shards import Shards
from shoal.torch.state import ModelState, StateBox
from shoal.wire.previous import CHECKPOINT_VERSION
from torch import Tensor

MIX = (0x9E3779B97F4A7C15 - (1 << 64), 0xBF58476D1CE4E5B9 - (1 << 64))


class ShardedState(ModelState):
    """`digest` and `describe` are those of this worker's rows and of everything that is not sharded."""

    def __init__(self, shards: Shards, box: StateBox) -> None:
        super().__init__([shards.model], [shards.optimizer], box)
        self.shards, self.optimizer = shards, shards.optimizer
        self._of_model = list(self.model.parameters())

    def describe(self, facts: dict[str, Any], whole: bool = True) -> bytes:
        return super().describe({**facts, "shards": self.shards.describe()}, whole)

    # Checked mode

    def fingerprint(self, layout: Sequence[str]) -> Tensor:
        """A number whose sum over the workers depends on every bit of all rows, and not on who has which."""
        total = torch.zeros(1, dtype=torch.int64)
        shards = self.shards
        if shards.me not in layout:
            return total
        index = layout.index(shards.me)
        seed = 0
        for sharded in shards.all():
            slots = shards.slots(sharded)
            for name in (None, *sorted(slot_shapes(slots, sharded.shape))):
                seed += 1
                local = sharded.local if name is None else private.local_of(slots[name])
                total += fingerprint(local, sharded.rows, len(layout), index, seed)
        return total

    def digest(self, facts: Any = None) -> bytes:
        """SHA-256 over what is not sharded: it is equal on all members."""
        sha = hashlib.sha256()
        described = [
            (sorted((k, str(v)) for k, v in shapes.items()), sorted((k, repr(v)) for k, v in others.items()))
            for shapes, others in self.shards.describe()
        ]
        sha.update(repr((self.groups(), facts, described)).encode())
        return sha.digest()

    # Checkpoints: the same file as that of a replicated model

    def gather(self, facts: dict[str, Any]) -> dict[str, Any] | None:
        """Collect everything at the first worker, layer by layer, in host memory. None elsewhere, or if it broke."""
        shards, large = self.shards, list[Tensor]()
        packed = []
        numbers = {id(p): i for i, p in enumerate(self._of_model)}
        for sharded in shards.all():
            slots = shards.slots(sharded)
            names = (None, *slot_shapes(slots, sharded.shape))
            full = {n: self._full(sharded, sharded.local if n is None else slots[n]) for n in names}
            if shards.collectives.broken:
                return None
            if shards.members.index(shards.me) == 0:
                value = full.pop(None).reshape(-1)
                ranges = {k: v.reshape(-1) for k, v in full.items()}
                others = {k: v for k, v in slots.items() if k not in ranges}
                piece = Piece(numbers[id(sharded.param)], 0, value.numel())
                packed.append((piece, place(value, large), place(ranges, large), place(others, large)))
        if shards.members.index(shards.me) != 0:
            return None
        return {
            "shoal": CHECKPOINT_VERSION,
            "signature": self.signature(),
            "facts": self.describe(facts),
            "pieces": dumps(packed),
            "large": large,
        }

    def _full(self, sharded: Any, value: Any) -> Tensor:
        """All rows of a parameter or of one of its optimizer states, in host memory."""
        shards, local = self.shards, private.local_of(value)
        size = len(shards.members)
        part = -(-sharded.rows // size)
        padded = local.new_zeros(part, *sharded.shape[1:])
        padded[: local.shape[0]] = local
        whole = local.new_empty(part * size, *sharded.shape[1:])
        with torch.no_grad():
            shards.collectives.all_gather(whole.view(-1), padded.view(-1))
        return whole[: sharded.rows].cpu()

    def load(self, file: IO[bytes]) -> dict[str, Any]:
        """For a worker that has all rows: it is the only one of the layout."""
        assert len(self.shards.members) == 1
        saved = self.read(file)
        received, large = pickle.loads(saved["pieces"]), saved["large"]
        by_number = dict(enumerate(self._of_model))
        of = {id(s.param): s for s in self.shards.all()}
        with torch.no_grad():
            for piece, value, ranges, others in received:
                sharded = of[id(by_number[piece.index])]
                self._write(sharded.local, piece, _found(value, large))
                before = self.optimizer.state.pop(sharded.param, {})
                slots: dict[str, Any] = {k: _found(v, large) for k, v in others.items()}
                for name, part in ranges.items():
                    part = _found(part, large)
                    mine = before.get(name)
                    local = private.local_of(mine)
                    if local is None:
                        local = torch.zeros_like(sharded.local, dtype=part.dtype)
                    self._write(local, piece, part)
                    slots[name] = private.like(sharded, local)
                if slots:
                    self.optimizer.state[sharded.param] = slots
        facts: dict[str, Any] = pickle.loads(saved["facts"])
        self.adopt(facts)
        return facts

    @staticmethod
    def _write(home: Tensor, piece: Piece, value: Tensor) -> None:
        home.view(-1)[piece.low : piece.high] = value


def _found(value: Any, large: list[Tensor]) -> Any:
    return large[value.index] if hasattr(value, "index") and not isinstance(value, Tensor) else value


def fingerprint(local: Tensor, rows: int, size: int, index: int, seed: int) -> Tensor:
    """A sum over the elements of a mix of their bits with their place. It wraps around at 64 bits."""
    flat = local.detach().reshape(-1)
    if not flat.numel():
        return torch.zeros(1, dtype=torch.int64)
    word = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()]
    bits = flat.view(word).to(device="cpu", dtype=torch.int64)
    first = min(rows, index * -(-rows // size)) * (flat.numel() // local.shape[0])
    place_ = torch.arange(first, first + flat.numel()) + (seed << 40)
    mixed = (bits ^ (place_ * MIX[0])) * MIX[1]
    return ((mixed ^ (mixed >> 29)) * MIX[0]).sum().reshape(1)
