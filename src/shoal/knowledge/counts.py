"""Check of counts, such as a number of GPUs."""

from __future__ import annotations

from numbers import Integral

#: More than any cluster has.
MOST = 1_000_000


def is_count(value: object, least: int = 1, most: int = MOST) -> bool:
    """Whether `value` is an integer in this range."""
    return isinstance(value, Integral) and least <= int(value) <= most
