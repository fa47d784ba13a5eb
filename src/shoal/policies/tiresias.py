"""Tiresias: least attained service in a few queues, for gangs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from shoal.core.arrays import FloatArray, IntArray
from shoal.core.errors import ShoalError
from shoal.core.view import View
from shoal.policies.base import CountPolicy
from shoal.policies.order import fill_in_order

#: Services and times are sums of floats, so a threshold counts as reached slightly below it.
_NEARLY = 1 - 1e-12


@dataclass(frozen=True)
class TiresiasOptions:
    #: The policy name in error messages.
    policy: ClassVar[str] = "tiresias-l"
    #: Service in GPU-seconds at which a job is demoted to the next queue; one value makes two queues.
    thresholds_gpu_s: tuple[float, ...] = (180_000.0,)
    #: What counts as service: since-start (GPU-time since the job last started; as in the AFS evaluation) or
    #: attained (all GPU-time so far; as in Tiresias).
    service: str = "since-start"
    #: A waiting job is promoted to the first queue after waiting this many times as long as its last run; 0: never.
    promote: float = 0.0

    def __post_init__(self) -> None:
        given = ",".join(f"{threshold:g}" for threshold in self.thresholds_gpu_s)
        if not self.thresholds_gpu_s or list(self.thresholds_gpu_s) != sorted(set(self.thresholds_gpu_s)):
            raise ShoalError(
                f"option thresholds_gpu_s={given} of policy {self.policy!r} must be ascending numbers"
            )
        if self.thresholds_gpu_s[0] <= 0:
            raise ShoalError(f"option thresholds_gpu_s={given} of policy {self.policy!r} must be above 0")
        if self.service not in ("since-start", "attained"):
            raise ShoalError(
                f"option service={self.service!r} of policy {self.policy!r} must be since-start or attained"
            )
        if self.promote < 0:
            raise ShoalError(f"option promote={self.promote:g} of policy {self.policy!r} must be 0 or more")


class TiresiasL(CountPolicy):
    """Two-dimensional least attained service (Gu et al., NSDI'19), lengths unknown.

    The service of a job is its GPUs x time. Jobs start in the first of two or more queues and are demoted when
    their service reaches a threshold. Lower queues get only the GPUs that upper queues leave. All or nothing
    at the requested size; later jobs may start before one that does not fit. With `promote` k, a job that has
    waited k times as long as its last run returns to the first queue: ahead of the other jobs there
    (since-start), or behind them with its service reset (attained).

    service=since-start is the variant of the AFS authors: service counts since the job last started, and a job
    stays demoted until it starts again. The order inside a queue is (first start, arrival).
    service=attained is Tiresias itself: all service counts. Inside a queue, jobs are in the order in which they
    entered it, running jobs before waiting ones.

    State of each job: its queue (-1: promoted), the service it had attained when it was promoted, the length of
    its last run, and its position in its queue.
    """

    name = "tiresias-l"
    columns = ("queue", "promoted_at_gpu_s", "last_run_s", "place_in_line")
    summary = "least attained GPU-time first, in queues, at the requested size (NSDI'19)"
    elastic = False
    Options = TiresiasOptions

    def service_now(self, view: View, now_s: float) -> FloatArray:
        if self.options.service == "attained":
            return view.attained_now(now_s) - view.column("promoted_at_gpu_s")
        running = view.gpus > 0
        return np.where(running, (now_s - np.where(running, view.last_start_s, now_s)) * view.gpus, 0.0)

    def demote_and_promote(self, view: View, now_s: float) -> None:
        thresholds = np.array(self.options.thresholds_gpu_s) * _NEARLY
        queue = np.searchsorted(thresholds, self.service_now(view, now_s), side="right")
        demoted = queue > np.maximum(view.column("queue"), 0)
        view.column("queue")[demoted] = queue[demoted]
        view.column("place_in_line")[demoted] = 0  # no position yet: behind all jobs with one
        running = view.gpus > 0
        view.column("last_run_s")[running] = (now_s - view.last_start_s)[running]
        if self.options.promote > 0:
            due_s = (view.changed_s + self.options.promote * view.column("last_run_s")) * _NEARLY
            starving = ~running & (view.column("queue") > 0) & (now_s >= due_s)
            view.column("queue")[starving] = -1
            view.column("promoted_at_gpu_s")[starving] = view.attained_gpu_s[starving]
            view.column("place_in_line")[starving] = 0

    def order(self, view: View, now_s: float) -> IntArray:
        if self.options.service == "attained":
            place = np.where(view.column("place_in_line") > 0, view.column("place_in_line"), np.inf)
            keys = (view.submit_s, place, np.maximum(view.column("queue"), 0))
        else:
            keys = (view.submit_s, view.first_start_s, view.column("queue"))
        return np.lexsort(keys).astype(np.int32)

    def shares(self, view: View, gpus: int, now_s: float) -> IntArray:
        if self.options.service == "since-start" and view.requested_gpus.sum() <= gpus:
            # All jobs run, so queues do not matter. Demotion is computed again when they do.
            view.column("queue")[view.gpus == 0] = 0
            return view.requested_gpus.copy()
        self.demote_and_promote(view, now_s)
        order = self.order(view, now_s)
        shares = fill_in_order(order, view.requested_gpus, gpus, True)
        # In a queue, running jobs precede waiting ones; otherwise the order stays.
        line = order[np.argsort(shares[order] == 0, kind="stable")]
        view.column("place_in_line")[line] = np.arange(1, len(line) + 1)
        starts = (shares > 0) & (view.gpus == 0)
        if self.options.service == "since-start":
            view.column("queue")[starts] = 0
        else:
            view.column("queue")[starts] = np.maximum(view.column("queue")[starts], 0)
        return shares

    def wake_s(self, view: View, shares: IntArray, now_s: float) -> float:
        if shares.all():
            return np.inf
        waiting = shares == 0
        thresholds = np.append(np.array(self.options.thresholds_gpu_s), np.inf)
        run = np.flatnonzero(shares)
        kept = view.gpus[run] > 0
        served = np.where(kept, self.service_now(view, now_s)[run], 0.0)
        if self.options.service == "attained":
            served = (view.attained_now(now_s) - view.column("promoted_at_gpu_s"))[run]
        # If all requests fit by number but not by type, no job was demoted above: skip thresholds already passed.
        queue = np.maximum(
            view.column("queue")[run], np.searchsorted(thresholds * _NEARLY, served, side="right")
        )
        to_go = thresholds[queue.astype(int)] - served
        wake = float((now_s + np.maximum(to_go, 0.0) / shares[run]).min()) if len(run) else np.inf
        if self.options.promote > 0:
            starve = np.flatnonzero(waiting & (view.column("queue") > 0))
            if len(starve):
                due = view.changed_s[starve] + self.options.promote * view.column("last_run_s")[starve]
                # A job that this decision preempts starts to wait now.
                due = np.where(
                    view.gpus[starve] > 0,
                    now_s + self.options.promote * view.column("last_run_s")[starve],
                    due,
                )
                wake = min(wake, float(due.min()))
        return max(wake, float(np.nextafter(now_s, np.inf)))

    def evidence(self, view: View, row: int, now_s: float) -> dict[str, float | int | str]:
        return {
            "queue": int(max(view.column("queue")[row], 0)),
            "service_gpu_s": float(self.service_now(view, now_s)[row]),
        }
