"""What can be a number of GPUs, or of anything else that is counted."""

from __future__ import annotations

from numbers import Integral

#: More than any cluster has.
MOST = 1_000_000


def is_count(value: object, least: int = 1, most: int = MOST) -> bool:
    """Whether it is a whole number within these bounds."""
    return isinstance(value, Integral) and least <= int(value) <= most
