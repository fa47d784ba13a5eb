"""First in, first out."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shoal.core.arrays import IntArray
from shoal.core.compiled import kernel
from shoal.core.view import View
from shoal.policies.base import CountPolicy


@kernel
def fifo_shares(now: IntArray, want: IntArray, gpus: int, backfill: bool) -> IntArray:
    """Running jobs keep their GPUs. The others, in order, get what they want if it is free.

    A job that runs at another size than it wants, because its owner changed it, precedes waiting jobs.
    """
    shares, free = np.zeros(len(want), np.int32), gpus
    for i in range(len(want)):
        if now[i] == want[i]:
            shares[i] = want[i]
            free -= want[i]
    for i in range(len(want)):
        if shares[i] == 0 and now[i] > 0 and want[i] <= free:
            shares[i] = want[i]
            free -= want[i]
    for i in range(len(want)):
        if free <= 0:
            break
        if shares[i] == 0:
            if want[i] <= free:
                shares[i] = want[i]
                free -= want[i]
            elif not backfill:
                break
    return shares


@dataclass(frozen=True)
class FifoOptions:
    #: Later jobs may start before one that does not fit (as in the AFS evaluation); false: strict order.
    backfill: bool = True


class Fifo(CountPolicy):
    """Running jobs keep their GPUs; waiting jobs start in order of arrival.

    A job gets exactly its request if it fits, else nothing. Order: (time scheduled, arrival). With
    `backfill`, a later job may start before one that does not fit (AFS, NSDI'21, baselines). Without it, the
    first job that does not fit blocks all later ones (Tiresias' simulator).
    """

    name = "fifo"
    summary = "in order of arrival, at the requested size, running jobs are never stopped"
    elastic = False
    Options = FifoOptions

    @property
    def backfills(self) -> bool:
        return bool(self.options.backfill)

    def shares(self, view: View, gpus: int, now_s: float) -> IntArray:
        return fifo_shares(view.gpus, view.requested_gpus, gpus, self.options.backfill)
