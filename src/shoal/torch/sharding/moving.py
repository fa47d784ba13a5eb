"""Moving the rows of one layer to their new owners: one exchange per layer, of the rows whose owner changes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from shoal.torch.sharding.reshard import Overlap, overlaps, part_rows, span
from torch import Tensor

Exchange = Callable[[Tensor, list[int], list[int]], Tensor | None]
"""(bytes for all workers, bytes for each, bytes from each) -> bytes from all workers. None if it broke."""


@dataclass(slots=True)
class Rows:
    """A tensor of which this worker has some rows: a parameter or one of its optimizer states."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    held: list[tuple[int, Tensor]]  # its rows in the old layout: (first row, rows)

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape[1:]) * int(self.dtype.itemsize)

    def cut(self, low: int, high: int) -> Tensor:
        """Rows that this worker has."""
        for begin, rows in self.held:
            if begin <= low and high <= begin + len(rows):
                return rows[low - begin : high - begin]
        raise ValueError(f"this worker does not have the rows {low} to {high}")


@dataclass(frozen=True, slots=True)
class Change:
    """From the workers of one layout to those of another. `peers` exchange the rows; `me` is one of them.

    In the old layout a worker may be named several times: it has a copy of the rows of one that was lost.
    """

    old: Sequence[str]
    new: Sequence[str]
    peers: Sequence[str]
    me: str


def move(tensors: list[Rows], change: Change, exchange: Exchange) -> list[Tensor | None] | None:
    """The rows of each tensor in the new layout, padded as torch does; None for a worker that has none there.

    Returns None if the exchange broke. The local tensors are unchanged then.
    """
    plans = [overlaps(t.shape[0], change.old, change.new) for t in tensors]
    received: dict[str, Tensor] = {}
    if any(o.moves for plan in plans for o in plan):
        parts = _exchange(tensors, plans, change, exchange)
        if parts is None:
            return None
        received = parts
    if change.me not in change.new:
        return [None] * len(tensors)
    return [_placed(t, plan, change, received) for t, plan in zip(tensors, plans)]


def _exchange(
    tensors: list[Rows], plans: list[list[Overlap]], change: Change, exchange: Exchange
) -> dict[str, Tensor] | None:
    me, peers = change.me, list(change.peers)
    pieces: dict[str, list[Tensor]] = {peer: [] for peer in peers}
    coming_bytes = dict.fromkeys(peers, 0)
    for tensor, plan in zip(tensors, plans):
        for o in plan:
            if o.moves and o.source == me:
                pieces[o.target].append(as_bytes(tensor.cut(o.low, o.high)))
            elif o.moves and o.target == me:
                coming_bytes[o.source] += (o.high - o.low) * tensor.row_bytes
    sent = [piece for peer in peers for piece in pieces[peer]]
    device = tensors[0].device
    flat = torch.cat(sent) if sent else torch.empty(0, dtype=torch.uint8, device=device)
    sent_bytes = [sum(piece.numel() for piece in pieces[peer]) for peer in peers]
    sizes = [coming_bytes[peer] for peer in peers]
    received = exchange(flat, sent_bytes, sizes)
    return None if received is None else dict(zip(peers, received.split(sizes)))


def _placed(tensor: Rows, plan: list[Overlap], change: Change, received: dict[str, Tensor]) -> Tensor:
    """The new rows: those that stay, and those received. What is used of `received` is cut off."""
    me, rows = change.me, tensor.shape[0]
    padded = torch.zeros(
        part_rows(rows, len(change.new)), *tensor.shape[1:], dtype=tensor.dtype, device=tensor.device
    )
    begin = span(rows, len(change.new), change.new.index(me))[0]
    for o in plan:
        if o.target != me:
            continue
        home = padded[o.low - begin : o.high - begin]
        if not o.moves:
            home.copy_(tensor.cut(o.low, o.high))
        else:
            size = (o.high - o.low) * tensor.row_bytes
            as_bytes(home).copy_(received[o.source][:size])
            received[o.source] = received[o.source][size:]
    return padded


def as_bytes(tensor: Tensor) -> Tensor:
    """A view of its bytes, on its device."""
    flat = tensor.detach().reshape(-1)
    return flat.view(torch.uint8) if flat.numel() else flat.new_empty(0, dtype=torch.uint8)


def slot_shapes(slots: dict[str, Any], shape: Sequence[int]) -> dict[str, torch.dtype]:
    """The optimizer states that have a row for each row of the parameter, with their types."""
    return {
        name: value.dtype
        for name, value in slots.items()
        if isinstance(value, Tensor) and tuple(value.shape) == tuple(shape) and value.dim() > 0
    }
