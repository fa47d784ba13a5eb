"""A model whose parameters and optimizer state are sharded over workers that may change.

`Shards` owns the layout: which workers have the rows, in which order. To change it, the rows of one layer after the
other are moved to their new owners, so the memory peak is that of one layer above the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from shoal.torch.packing import copied
from shoal.torch.sharding import private
from shoal.torch.sharding.moving import Change, Rows, move, slot_shapes
from shoal.torch.sharding.private import Collectives, Sharded
from shoal.torch.sharding.reshard import span
from torch import Tensor, nn

Held = Callable[[Sharded, str | None], list[tuple[int, Tensor]]]
"""(parameter, optimizer state or None) -> the rows of it that this worker has, as (first row, rows)."""


class Shards:
    """Until the worker joins a generation it is the only one of the layout, and has all rows."""

    def __init__(self, model: nn.Module, optimizer: Any, me: str, mesh: Any, alone: Collectives) -> None:
        self.model, self.optimizer, self.me = model, optimizer, me
        self.mesh, self.collectives = mesh, alone
        self.members: tuple[str, ...] = (me,)
        #: Some layers have the old layout and some the new one: a worker died while the rows moved.
        self.torn = False
        self.moved_bytes = 0

    @property
    def layers(self) -> list[list[Sharded]]:
        return private.layers(self.model)

    def all(self) -> Iterator[Sharded]:
        for layer in self.layers:
            yield from layer

    def mute(self, on: bool) -> None:
        """Let collectives end at once, without a result. What was gathered in this way is dropped at the end."""
        self.collectives.muted = on
        if not on:
            self.release()

    def release(self) -> None:
        """Free parameters that are still gathered."""
        private.release(self.model)

    def slots(self, sharded: Sharded) -> dict[str, Any]:
        found: dict[str, Any] = self.optimizer.state.get(sharded.param, {})
        return found

    # What a newcomer has to know before rows move to it

    def describe(self) -> list[tuple[dict[str, torch.dtype], dict[str, Any]]]:
        """For each parameter: its sharded optimizer states by name and type, and the other ones."""
        described = []
        for sharded in self.all():
            slots = self.slots(sharded)
            shapes = slot_shapes(slots, sharded.shape)
            others = {k: v for k, v in slots.items() if k not in shapes}
            for name, value in others.items():
                if isinstance(value, Tensor) and value.numel() > 1:
                    raise RuntimeError(
                        f"{type(self.optimizer).__name__} keeps {name!r} of another shape than its parameter: "
                        "this cannot be sharded; use an optimizer such as AdamW or SGD"
                    )
            described.append((shapes, copied(others)))
        return described

    def adopt(self, described: list[tuple[dict[str, torch.dtype], dict[str, Any]]]) -> None:
        """Use another worker's description: the rows follow."""
        for sharded, (shapes, others) in zip(self.all(), described, strict=True):
            slots = {
                name: private.like(sharded, sharded.local.new_empty(0, *sharded.shape[1:], dtype=dtype))
                for name, dtype in shapes.items()
            }
            slots |= others
            if slots:
                self.optimizer.state[sharded.param] = slots
            else:
                self.optimizer.state.pop(sharded.param, None)

    # Changes of the layout

    def rebind(self, collectives: Collectives, members: Sequence[str] | None = None) -> None:
        """The same rows in a new group. `members`: its workers, if they are others."""
        private.release(self.model)
        self.mesh = private.make_mesh(collectives, self.mesh.device_type, before=self.mesh)
        for sharded in self.all():
            private.rebind(sharded, self.mesh)
            self._rebind_slots(sharded)
        self._use(collectives)
        self.members = self.members if members is None else tuple(members)

    def change(
        self,
        new: Sequence[str],
        moving: Collectives,
        peers: Sequence[str],
        after: Collectives | None,
        old: Sequence[str] | None = None,
        held: Held | None = None,
    ) -> bool:
        """Move all rows from the present layout (or `old`) to that of the workers `new`.

        `peers` are the workers of the group `moving`, `after` is the group of `new`, None for a worker that leaves.
        `held` finds the rows that this worker has in the old layout, if they are not its live ones.
        False: it broke on the way.
        """
        old = tuple(old or self.members)
        held = held or self._live(old)
        private.release(self.model)
        self.torn = True
        if after is not None:
            self.mesh = private.make_mesh(after, self.mesh.device_type, before=self.mesh)
        moves = Change(old, tuple(new), tuple(peers), self.me)

        def exchange(sent: Tensor, sent_sizes: list[int], sizes: list[int]) -> Tensor | None:
            self.moved_bytes += sum(sizes)
            return moving.exchange(sent, sent_sizes, sizes)

        for layer in self.layers:
            if not self._change_layer(layer, moves, held, exchange):
                return False
        if after is not None:
            self._use(after)
        self.members, self.torn = tuple(new), False
        return True

    def _live(self, old: Sequence[str]) -> Held:
        """The rows of the live tensors, of which this worker is the one owner."""

        def held(sharded: Sharded, name: str | None) -> list[tuple[int, Tensor]]:
            if self.me not in old:
                return []
            local = sharded.local if name is None else private.local_of(self.slots(sharded)[name])
            return [(span(sharded.rows, len(old), list(old).index(self.me))[0], local)]

        return held

    def _change_layer(
        self, layer: list[Sharded], moves: Change, held: Held, exchange: Callable[..., Tensor | None]
    ) -> bool:
        tensors, homes = [], []
        for sharded in layer:
            slots = self.slots(sharded)
            for name in (None, *slot_shapes(slots, sharded.shape)):
                local = sharded.local if name is None else private.local_of(slots[name])
                tensors.append(Rows(tuple(sharded.shape), local.dtype, local.device, held(sharded, name)))
                homes.append((sharded, name))
        with torch.no_grad():
            moved = move(tensors, moves, exchange) if tensors else []
        if moved is None:
            return False
        if self.me in moves.new:
            self._place(homes, moved, moves)
        return True

    def _place(
        self, homes: list[tuple[Sharded, str | None]], moved: list[Tensor | None], moves: Change
    ) -> None:
        index = moves.new.index(self.me)
        for (sharded, name), padded in zip(homes, moved):
            assert padded is not None
            low, high = span(sharded.rows, len(moves.new), index)
            if name is None:
                private.relayout(sharded, self.mesh, padded, high - low)
            else:
                self.slots(sharded)[name] = private.like(sharded, padded.narrow(0, 0, high - low))

    def reset(self, collectives: Collectives) -> None:
        """This worker is the only one again, with rows of any value: it is about to receive them."""
        self.mesh = private.make_mesh(collectives, self.mesh.device_type, before=self.mesh)
        for sharded in self.all():
            empty = torch.zeros(tuple(sharded.shape), dtype=sharded.local.dtype, device=sharded.local.device)
            private.relayout(sharded, self.mesh, empty, sharded.rows)
            self.optimizer.state.pop(sharded.param, None)
        self._use(collectives)
        self.members, self.torn = (self.me,), False

    def _rebind_slots(self, sharded: Sharded) -> None:
        slots = self.slots(sharded)
        for name in slot_shapes(slots, sharded.shape):
            slots[name] = private.like(sharded, private.local_of(slots[name]))

    def _use(self, collectives: Collectives) -> None:
        private.set_mesh(self.model, self.mesh)
        self.collectives = collectives
