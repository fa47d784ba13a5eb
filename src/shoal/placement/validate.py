"""Argument checks. An error message names the value and the range that is valid."""

from __future__ import annotations

import math
from operator import index

from shoal.core.errors import ShoalError

#: Upper limit for counts: more than any cluster has.
MANY = 10**9


def whole(what: str, value: object, least: int, most: int = MANY) -> int:
    """Return `value` if it is an integer in this range, else raise."""
    try:
        number = index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None or not least <= number <= most:
        raise ShoalError(f"{what} must be a whole number from {least} to {most}, not {value}")
    return number


def amount(what: str, value: float, least: float = 0.0, most: float = math.inf) -> float:
    """Return `value` if it is a finite number in this range, else raise."""
    if not (math.isfinite(value) and least <= value <= most):
        up = "up" if math.isinf(most) else f"to {most:g}"
        raise ShoalError(f"{what} must be a number from {least:g} {up}, not {value}")
    return value
