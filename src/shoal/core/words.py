"""Numbers in sentences."""

from __future__ import annotations

from collections.abc import Sequence


def counted(n: int | float, noun: str, plural: str | None = None) -> str:
    """`1 GPU`, `0 jobs`."""
    return f"{n:g} {noun if n == 1 else plural or noun + 's'}"


def listed(names: Sequence[str], total: int | None = None) -> str:
    """`a`, `a and b`, `a, b and 3 more`."""
    names, more = list(names), (total or len(names)) - len(names)
    if more > 0:
        names.append(f"{more} more")
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}" if names else ""
