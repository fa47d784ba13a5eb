"""Gang by gang in a given order: the common rule of policies that do not resize."""

from __future__ import annotations

import numpy as np

from shoal.core.arrays import FloatArray, IntArray
from shoal.core.compiled import kernel


@kernel
def fill_in_order(order: IntArray, want: IntArray, free: int, backfill: bool) -> IntArray:
    """Give each job of `order` exactly what it wants if that many GPUs are free, else nothing.

    With `backfill`, later jobs may start before one that does not fit. Without it, the first job that does not
    fit ends the round.
    """
    shares = np.zeros(len(want), np.int32)
    for row in order:
        if want[row] <= free:
            shares[row] = want[row]
            free -= want[row]
            if free == 0:
                break
        elif not backfill:
            break
    return shares


@kernel
def times_at(remaining: FloatArray, speeds: FloatArray, at: IntArray, gpus: IntArray) -> FloatArray:
    """Remaining time L = r / p(n) of each job at the given share."""
    times = np.empty(len(remaining))
    for i in range(len(remaining)):
        speed = speeds[at[i] + gpus[i]]
        times[i] = remaining[i] / speed if speed > 0 else np.inf
    return times
