"""What travels in the vote that ends a step: one whole number per member, added up over all of them.

One element, because each one more costs gloo another round: 0.2 ms for one, 0.4 ms for three between two workers.
"""

from __future__ import annotations

COUNT_BITS = 12
MOST = (1 << COUNT_BITS) - 1
"""The most members of a generation; the numbers of generations have the rest of 63 bits."""


def ballot(flag: int, fits: bool) -> int:
    """`flag`: the generation this member is ready to switch to, or 0. `fits`: one window is enough for the rest."""
    return (flag > 0) + (int(fits) << COUNT_BITS) + (flag << 2 * COUNT_BITS)


def count(ballots: int) -> tuple[int, int, int]:
    """Of the sum of all ballots: how many raised a flag, for how many the rest fits, and the sum of the flags."""
    return ballots & MOST, (ballots >> COUNT_BITS) & MOST, ballots >> 2 * COUNT_BITS
