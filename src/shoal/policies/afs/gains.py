"""What one GPU more gains, by the rule of AFS."""

from __future__ import annotations

import numpy as np

from shoal.core.arrays import FloatArray
from shoal.core.compiled import inlined


@inlined
def gains(speeds: FloatArray, at: int, gpus: int, limit: int) -> tuple[float, float]:
    """As the shorter and as the longer of two jobs; at its cap a job takes no part."""
    if gpus >= limit:
        return -np.inf, -np.inf
    now, then = speeds[at + gpus], speeds[at + gpus + 1]
    return (then - now) / now, (then - now) / then
