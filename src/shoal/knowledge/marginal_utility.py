"""How many GPUs are worth it: the law of diminishing marginal utility (Liquid, TPDS'21).

The marginal utility of the n-th GPU is the speed that it adds, relative to the speed of one GPU:

    u(n) = (f(n) - f(n-1)) / f(1).

It diminishes with n. The right number is the largest n with u(n) >= `least`. Measured curves are not smooth
(a share of 3 is often no faster than 2, but 4 is), so the gains are taken on the concave hull of the curve:
each step counts with the average gain of its segment.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shoal.knowledge.counts import is_count
from shoal.knowledge.speed_models import Floats
from shoal.knowledge.unknown import Unknown

LEAST = 0.5
MOST_GAIN = 1e9


@dataclass(frozen=True, slots=True, eq=False)
class RightShare:
    """The chosen number of GPUs; entry n of `marginal` is the utility of the n-th GPU (entry 0 is 0)."""

    gpus: int
    marginal: Floats


def right_share(
    speed: Floats, *, min_gpus: int = 1, max_gpus: int | None = None, least: float = LEAST
) -> RightShare | Unknown:
    """The right number of GPUs for a speed by share (entry n for n GPUs, entry 0 is 0)."""
    speed = np.asarray(speed, dtype=np.float64)
    if speed.ndim != 1 or not abs(least) < np.inf:
        return Unknown(f"there must be one speed per share, and the least gain must be a number, not {least}")
    if not is_count(min_gpus) or not (max_gpus is None or is_count(max_gpus)):
        return Unknown(f"{min_gpus} to {max_gpus} is not a range of GPUs")
    top = len(speed) - 1 if max_gpus is None else min(max_gpus, len(speed) - 1)
    if top < min_gpus or min_gpus < 1:
        return Unknown(f"no speed is known for a share from {min_gpus} up")
    if not (np.isfinite(speed[1]) and speed[1] > 0):
        return Unknown("the speed on one GPU is not known, so gains cannot be compared")
    if (np.abs(speed[np.isfinite(speed)]) / MOST_GAIN >= speed[1]).any():
        return Unknown(f"a speed of more than {MOST_GAIN:g} times that of one GPU is not plausible")
    marginal = np.diff(concave_hull(speed[: top + 1]), prepend=0.0) / speed[1]
    worth = np.flatnonzero(marginal >= least - 1e-12)
    return RightShare(max(int(worth.max(initial=0)), min_gpus), marginal)


def concave_hull(speed: Floats) -> Floats:
    """The smallest concave curve above the points (0, 0), (n, f(n)); NaN entries are unknown."""
    known = [n for n in range(len(speed)) if n == 0 or np.isfinite(speed[n])]
    corners: list[int] = []
    for n in known:
        while len(corners) >= 2 and _is_below(speed, corners[-2], corners[-1], n):
            corners.pop()
        corners.append(n)
    hull = np.interp(np.arange(len(speed)), corners, np.where(np.isfinite(speed), speed, 0.0)[corners])
    return np.asarray(np.maximum.accumulate(hull), dtype=np.float64)


def _is_below(speed: Floats, a: int, b: int, c: int) -> bool:
    """Whether the point at b lies on or below the line from a to c."""
    return bool((speed[b] - speed[a]) * (c - a) <= (speed[c] - speed[a]) * (b - a))
