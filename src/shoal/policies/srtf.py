"""Shortest remaining time, and shortest remaining service, first."""

from __future__ import annotations

import numpy as np

from shoal.core.arrays import FloatArray, IntArray
from shoal.core.view import View
from shoal.policies.base import CountPolicy
from shoal.policies.gpu_types import times_as_requested
from shoal.policies.order import fill_in_order


class _Shortest(CountPolicy):
    elastic = False
    needs_lengths = True
    takes_unknown_lengths = False

    def key(self, view: View, now_s: float) -> FloatArray:
        raise NotImplementedError

    def shares(self, view: View, gpus: int, now_s: float) -> IntArray:
        if view.requested_gpus.sum() <= gpus:
            return view.requested_gpus.copy()  # all fit in any order
        order = np.argsort(self.key(view, now_s), kind="stable").astype(np.int32)
        return fill_in_order(order, view.requested_gpus, gpus, True)

    def evidence(self, view: View, row: int, now_s: float) -> dict[str, float | int | str]:
        key = self.key(view, now_s)
        return {"key": float(key[row]), "shorter_jobs": int(np.count_nonzero(key < key[row]))}


class Srtf(_Shortest):
    """Shortest remaining time first: order by L_j(req) = r_j / p_j(req), ascending.

    Preemptive, all or nothing at the requested size; later jobs may start before one that does not fit.
    Tiresias (NSDI'19) and AFS (NSDI'21) use it as the baseline that knows every length.
    """

    name = "srtf"
    summary = "shortest remaining time first, at the requested size, preemptive"

    def key(self, view: View, now_s: float) -> FloatArray:
        return times_as_requested(view, view.remaining_now(now_s))


class Srsf(_Shortest):
    """Shortest remaining service first: order by req_j x L_j(req), the remaining GPU-time, ascending.

    The rest is as in SRTF (Tiresias, NSDI'19).
    """

    name = "srsf"
    summary = "least remaining GPU-time first, at the requested size, preemptive"

    def key(self, view: View, now_s: float) -> FloatArray:
        return times_as_requested(view, view.remaining_now(now_s)) * view.requested_gpus
