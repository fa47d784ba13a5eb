"""Numbers that a placement can do something with; others are refused in a sentence that says which would do."""

from __future__ import annotations

import math
from operator import index

from shoal.core.errors import ShoalError

#: More of anything than any cluster has.
MANY = 10**9


def whole(what: str, value: object, least: int, most: int = MANY) -> int:
    """A whole number within these bounds."""
    try:
        number = index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None or not least <= number <= most:
        raise ShoalError(f"{what} must be a whole number from {least} to {most}, not {value}")
    return number


def amount(what: str, value: float, least: float = 0.0, most: float = math.inf) -> float:
    """A finite number that is not below `least` nor above `most`."""
    if not (math.isfinite(value) and least <= value <= most):
        up = "up" if math.isinf(most) else f"to {most:g}"
        raise ShoalError(f"{what} must be a number from {least:g} {up}, not {value}")
    return value
