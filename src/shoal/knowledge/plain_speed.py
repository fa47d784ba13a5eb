"""The curve that decisions are made with, from noisy measurements."""

from __future__ import annotations

import numpy as np

from shoal.knowledge.speed_models import Floats

LEVEL = 1e-6
"""A relative difference of two speeds that is negligible but not zero."""
SIGNIFICANT = 0.15
"""Relative change of a speed that leads to a new profile and a new decision."""


def plain_speed(speed: Floats, min_gpus: int) -> Floats:
    """The curve that decisions are made with: a larger share counts as slower only if it plainly is.

    Measurements are noisy: a share that is slower than a smaller one by less than `SIGNIFICANT` counts as equally
    fast. No share below the job's minimum, which it can never have, counts as faster.
    """
    made = speed.copy()
    made[:min_gpus] = np.minimum(made[:min_gpus], (1.0 - LEVEL) * made[min_gpus])
    best = made[0]
    for gpus in range(1, len(made)):
        if (1.0 - SIGNIFICANT) * best < made[gpus] <= best:
            made[gpus] = best * (1.0 + LEVEL)
        best = max(best, made[gpus])
    return made
