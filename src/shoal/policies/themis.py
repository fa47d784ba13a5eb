"""Themis: finish-time fairness."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from shoal.core.arrays import FloatArray, IntArray
from shoal.core.compiled import kernel
from shoal.core.options import at_least_a_second
from shoal.core.view import View
from shoal.core.words import spoken
from shoal.policies.base import CountPolicy
from shoal.policies.gpu_types import times_as_requested


@kernel
def grant_in_order(order: IntArray, least: IntArray, most: IntArray, free: int) -> IntArray:
    """Give each job of `order` min(free GPUs, its demand), or nothing if that is below its minimum."""
    shares = np.zeros(len(most), np.int32)
    for row in order:
        if free == 0:
            break
        take = min(free, most[row])
        if take >= least[row]:
            shares[row] = take
            free -= take
    return shares


@dataclass(frozen=True)
class ThemisOptions:
    #: Leases end at multiples of this time. All GPUs are then offered again.
    lease_s: float = 1200.0

    def __post_init__(self) -> None:
        at_least_a_second("lease_s", self.lease_s, "themis")


class Themis(CountPolicy):
    """Finish-time fairness (Mahajan et al., NSDI'20): the job with the worst finish-time fairness goes first.

        rho = T_shared / T_ideal
        T_shared = time since submission + remaining time at the requested size
        T_ideal = total GPU-time / min(M / mean number of active jobs, requested size)

    When leases end, the job with the largest rho gets min(free GPUs, its demand), then the next one.
    Between lease ends, running jobs keep their GPUs, and free GPUs go to waiting jobs, again by rho. The
    auction of the paper, in which jobs bid their rho, is not modelled: rho is computed.
    """

    name = "themis"
    summary = "finish-time fairness: the job treated worst goes first; lengths known (NSDI'20)"
    needs_lengths = True
    takes_unknown_lengths = False
    Options = ThemisOptions

    def __init__(self, options: object = None, *, rng: np.random.Generator | None = None) -> None:
        super().__init__(options, rng=rng)
        self._active_sum = 0.0
        self._events = 0
        self._lease_end_s = -np.inf

    def wish_gpus(self, view: View) -> IntArray:
        return view.requested_gpus

    @property
    def quantum(self) -> str:
        return f"jobs keep their GPUs for a lease of {spoken(self.options.lease_s)}, then they are allocated anew"

    def rho(self, view: View, gpus: int, now_s: float) -> FloatArray:
        want = view.requested_gpus
        left_s = times_as_requested(view, view.remaining_now(now_s))
        whole_s = times_as_requested(view, view.total)
        contention = max(self._active_sum / max(self._events, 1), 1.0)
        ideal = whole_s * want / np.minimum(max(gpus, 1) / contention, want)
        # Rounded, so that jobs that were never delayed all have rho = 1 exactly.
        return np.round((now_s - view.submit_s + left_s) / ideal, 9)

    def shares(self, view: View, gpus: int, now_s: float) -> IntArray:
        self._active_sum += len(view)
        self._events += 1
        if view.requested_gpus.sum() <= gpus:
            return view.requested_gpus.copy()  # all fit in any order
        if now_s >= self._lease_end_s:
            self._lease_end_s = self._next_lease_s(now_s)
            order = np.argsort(-self.rho(view, gpus, now_s), kind="stable").astype(np.int32)
            return grant_in_order(order, view.min_gpus, view.requested_gpus, gpus)
        shares = np.minimum(view.gpus, view.requested_gpus)
        shares[shares < view.min_gpus] = 0  # its owner has raised its minimum
        free = gpus - int(shares.sum())
        waiting = np.flatnonzero(shares < view.requested_gpus)
        if free <= 0 or not len(waiting):
            return shares
        rho = self.rho(view, gpus, now_s)[waiting]
        order = waiting[np.argsort(-rho, kind="stable")].astype(np.int32)
        least = np.where(shares > 0, 1, view.min_gpus).astype(np.int32)
        return shares + grant_in_order(order, least, view.requested_gpus - shares, free)

    def wake_s(self, view: View, shares: IntArray, now_s: float) -> float:
        if not (shares < view.requested_gpus).any():
            return np.inf
        # If all requests fit by number but not by type, no lease has started.
        return self._lease_end_s if self._lease_end_s > now_s else self._next_lease_s(now_s)

    def _next_lease_s(self, now_s: float) -> float:
        leases = np.floor(now_s / self.options.lease_s) + 1
        if leases * self.options.lease_s <= now_s:  # the quotient was rounded down
            leases += 1
        return float(leases * self.options.lease_s)

    def evidence(self, view: View, row: int, now_s: float) -> dict[str, float | int | str]:
        return {"rho": float(self.rho(view, view.total_gpus, now_s)[row])}

    def state(self) -> dict[str, Any]:
        mine = {"active_sum": self._active_sum, "events": self._events, "lease_end_s": self._lease_end_s}
        return super().state() | mine

    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        self._active_sum = state["active_sum"]
        self._events = state["events"]
        self._lease_end_s = state["lease_end_s"]
