"""Max-min fairness over the number of GPUs."""

from __future__ import annotations

import numpy as np

from shoal.core.arrays import IntArray
from shoal.core.compiled import kernel
from shoal.core.view import View
from shoal.policies.base import CountPolicy


@kernel
def max_min_shares(order: IntArray, min_gpus: IntArray, max_gpus: IntArray, gpus: int) -> IntArray:
    """Round robin, one GPU per pass, up to each job's maximum, until the GPUs run out.

    The result is computed by water filling: all jobs get min(level, max) for the largest level that fits, and
    the GPUs left go one each to the first jobs that can take one more.
    """
    n = len(order)
    shares = np.zeros(n, np.int32)
    left = gpus
    # The first pass gives the minimum, because a job runs with at least its minimum or not at all.
    for row in order:
        if min_gpus[row] <= left:
            shares[row] = min_gpus[row]
            left -= min_gpus[row]
        if left == 0:
            return shares
    low, high = 0, 0
    for i in range(n):
        high = max(high, max_gpus[i])
    while low < high:  # bisect for the largest level that fits
        level = (low + high + 1) // 2
        need = 0
        for i in range(n):
            if shares[i] > 0:
                need += max(min(level, max_gpus[i]) - shares[i], 0)
        if need <= left:
            low = level
        else:
            high = level - 1
    for i in range(n):
        if shares[i] > 0:
            more = max(min(low, max_gpus[i]) - shares[i], 0)
            shares[i] += more
            left -= more
    for row in order:
        if left == 0:
            break
        if shares[row] > 0 and shares[row] <= low and shares[row] < max_gpus[row]:
            shares[row] += 1
            left -= 1
    return shares


class MaxMin(CountPolicy):
    """Every job gets the same number of GPUs, up to the number that it can use.

    Jobs in order (time scheduled, arrival); round robin, one GPU per pass up to max_gpus until the GPUs
    run out (AFS, NSDI'21, baselines). The first pass gives a job its minimum.
    """

    name = "max-min"
    summary = "equal shares for all, up to what each can use"

    def shares(self, view: View, gpus: int, now_s: float) -> IntArray:
        order = np.argsort(view.first_start_s, kind="stable").astype(np.int32)
        return max_min_shares(order, view.min_gpus, view.max_gpus, gpus)
