"""Which rows of a parameter each worker has, and which rows change their owner. Pure arithmetic.

FSDP2 cuts each parameter along its first dimension into equal parts, the last ones shorter or empty (`torch.chunk`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Overlap:
    """Rows [low, high) that `source` has before and `target` has after a change. They may be the same worker."""

    source: str
    target: str
    low: int
    high: int

    @property
    def moves(self) -> bool:
        return self.source != self.target


def part_rows(rows: int, size: int) -> int:
    """The rows of the first part, to which all others are padded."""
    return -(-rows // size)


def span(rows: int, size: int, index: int) -> tuple[int, int]:
    """The rows of the index-th of `size` parts."""
    part = part_rows(rows, size)
    return min(rows, index * part), min(rows, (index + 1) * part)


def overlaps(rows: int, old: Sequence[str], new: Sequence[str]) -> list[Overlap]:
    """Every row once: who has it in the old layout and who in the new one. In the order of the rows."""
    found = []
    low = source = target = 0
    while low < rows:
        while span(rows, len(old), source)[1] <= low:
            source += 1
        while span(rows, len(new), target)[1] <= low:
            target += 1
        high = min(span(rows, len(old), source)[1], span(rows, len(new), target)[1])
        found.append(Overlap(old[source], new[target], low, high))
        low = high
    return found


def moved_rows(rows: int, old: Sequence[str], new: Sequence[str]) -> int:
    return sum(o.high - o.low for o in overlaps(rows, old, new) if o.moves)
