"""First in, first out."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shoal.core.view import View
from shoal.policies.base import CountPolicy, IntArray
from shoal.policies.order import fill_in_order


@dataclass(frozen=True)
class FifoOptions:
    #: Later jobs may pass one that does not fit (as in the AFS evaluation); false: strict order.
    backfill: bool = True


class Fifo(CountPolicy):
    """Running jobs keep their GPUs; waiting jobs start in order of arrival.

    A job gets exactly its request if it fits, else nothing. Order: (time scheduled, arrival). With
    `backfill` a later job may pass one that does not fit (AFS, NSDI'21, baselines); without it the first
    job that does not fit blocks all behind it (Tiresias' simulator).
    """

    name = "fifo"
    summary = "in order of arrival, at the requested size, running jobs are never stopped"
    elastic = False
    Options = FifoOptions

    def shares(self, view: View, gpus: int, now_s: float) -> IntArray:
        want = view.requested_gpus
        running = view.gpus > 0
        order = np.concatenate([np.flatnonzero(running), np.flatnonzero(~running)]).astype(np.int32)
        return fill_in_order(order, want, gpus, self.options.backfill)
