"""The fairness ledger: what each user was due, received, lent and borrowed."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from shoal.core.ledger import COLUMNS
from shoal.server.api import models as m
from shoal.server.api.models import JobState
from shoal.server.loop.clock import as_time
from shoal.server.loop.live_job import LiveJob
from shoal.server.loop.live_ledger import LiveLedger
from shoal.server.services.loop_view import LoopView


class Shares:
    def __init__(self, loop: LoopView, ledger: LiveLedger, idle_s: Callable[[LiveJob], float | None]) -> None:
        """`idle_s`: how long a job has held GPUs without using them."""
        self._loop, self._live, self._idle_s = loop, ledger, idle_s

    def show(self, since_s: float | None = None) -> m.ShareList:
        """The ledger since it began, or since its last sample before `since_s`."""
        ledger, cluster = self._live.ledger, self._loop.scheduler.cluster
        ledger.settle(self._loop.now_s())
        begin_s: float = self._live.since_s
        before: dict[int, Any] = {}
        if since_s is not None:
            begin_s, before = _sample(ledger.state(), since_s)
        items = []
        for i, user in enumerate(cluster.users):
            known = i < len(ledger.users)
            account, traded = dict.fromkeys(COLUMNS, 0.0), {}
            if known:
                by_type = ledger.account[i] - np.asarray(before.get(i, 0.0))
                account = dict(zip(COLUMNS, map(float, by_type.sum(axis=0))))
                each = by_type[:, COLUMNS.index("traded")].tolist()
                traded = {t: x for t, x in zip(ledger.gpu_types, each) if abs(x) > 1e-6}
            mine = [j for j in self._loop.jobs.values() if j.user == user.name]
            items.append(
                m.Share(
                    user=user.name,
                    tickets=user.tickets,
                    gpus=sum(j.gpus for j in mine),
                    unused_gpus=sum(j.gpus for j in mine if self._idle_s(j) is not None),
                    entitled_gpus=float(ledger.rate[i, :, 0].sum()) if known else 0.0,
                    running_jobs=sum(j.gpus > 0 or j.life.state is JobState.RUNNING for j in mine),
                    pending_jobs=sum(j.life.state is JobState.PENDING and not j.gpus for j in mine),
                    **{f"{k}_gpu_s": v for k, v in account.items()},
                    traded_by_type_gpu_s=traded,
                )
            )
        capacity_gpu_s = self._live.capacity_gpu_s(begin_s, self._loop.now_s())
        used_gpu_s = sum(item.received_gpu_s for item in items)
        total = self._loop.scheduler.supply.total_gpus
        return m.ShareList(
            items=items,
            since=as_time(begin_s),
            total_gpus=total,
            idle_gpus=max(total - sum(item.gpus for item in items), 0),
            idle_gpu_s=max(capacity_gpu_s - used_gpu_s, 0.0),
            capacity_gpu_s=max(capacity_gpu_s, used_gpu_s),
            next=None,
        )

    def rates(self, column: str) -> Iterator[tuple[str, str, float]]:
        """(user, GPU type, GPUs) that are `borrowed` or `lent` now."""
        ledger = self._live.ledger
        for u, user in enumerate(ledger.users):
            for t, gpu_type in enumerate(ledger.gpu_types):
                yield user, gpu_type, float(ledger.rate[u, t, COLUMNS.index(column)])


def _sample(state: dict[str, Any], since_s: float) -> tuple[float, dict[int, Any]]:
    """(time, accounts by user) of the ledger's last sample before this time, or of its first."""
    times = state["times"]
    k = max(bisect_right(times, since_s) - 1, 0)
    return times[k], dict(enumerate(state["samples"][k]))
