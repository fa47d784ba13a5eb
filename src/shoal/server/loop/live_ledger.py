"""The fairness ledger of a live cluster. It continues over restarts and is updated after every decision."""

from __future__ import annotations

from typing import Any

import numpy as np

from shoal.core.cluster import Cluster
from shoal.core.ledger import Ledger
from shoal.scheduler.scheduler import Scheduler

#: Changes of the number of usable GPUs to remember.
MOST_CHANGES = 1000


class LiveLedger:
    def __init__(self, saved: dict[str, Any] | None, cluster: Cluster, now_s: float) -> None:
        """`saved` is of the last server; another set of GPU types begins anew."""
        types = cluster.gpu_types
        if saved and saved.get("gpu_types") == list(types):
            self.ledger, self.since_s = Ledger.restored(saved["state"], types), float(saved["since_s"])
            self.ledger.settle(now_s)
        else:
            self.ledger, self.since_s = Ledger((), types, start_s=now_s), now_s
        #: (time, GPUs that could be used from then on)
        self._supply: list[tuple[float, int]] = [(t, g) for t, g in (saved or {}).get("supply", [])]
        if not self._supply:
            self._supply = [(self.since_s, cluster.total_gpus)]

    def capacity_gpu_s(self, begin_s: float, end_s: float) -> float:
        """GPU time that could be used in this period."""
        ends = [t for t, _ in self._supply[1:]] + [end_s]
        spans = ((min(end, end_s) - max(t, begin_s), gpus) for (t, gpus), end in zip(self._supply, ends))
        return sum(max(span_s, 0.0) * gpus for span_s, gpus in spans)

    def use_types(self, types: tuple[str, ...], now_s: float) -> None:
        """Nodes with other types have come. The accounts of the types that were there go on."""
        before = self.ledger
        if before.gpu_types == types:
            return
        before.settle(now_s)
        saved = before.state()
        moved = [(t, types.index(name)) for t, name in enumerate(before.gpu_types) if name in types]

        def spread(table: Any) -> Any:
            old = np.array(table, float)
            new = np.zeros((len(old), len(types), *old.shape[2:]))
            for t, to in moved:
                new[:, to] = old[:, t]
            return new

        if saved["users"]:
            saved |= {name: spread(saved[name]) for name in ("account", "rate")}
            saved["samples"] = [spread(sample) if len(sample) else sample for sample in saved["samples"]]
        self.ledger = Ledger.restored(saved, types)

    def observe(self, scheduler: Scheduler, now_s: float) -> None:
        """What everybody has and is due from now on."""
        if scheduler.supply.total_gpus != self._supply[-1][1]:
            self._supply = [*self._supply, (now_s, scheduler.supply.total_gpus)][-MOST_CHANGES:]
        users = scheduler.supply.cluster.users  # with the tickets that groups divide among their users
        for user in users[len(self.ledger.users) :]:
            self.ledger.join(user.name)
        if users:
            self.ledger.observe(
                scheduler.view,
                np.array([u.tickets for u in users], np.float64),
                scheduler.supply.gpus_of_type,
                now_s,
                want_gpus=scheduler.policy.wish_gpus(scheduler.view),
                traded=scheduler.policy.traded(),
                entitled=scheduler.policy.entitled(),
            )

    def pause(self, now_s: float) -> None:
        """No job has GPUs, and nobody is due any, until the next `observe`."""
        self.ledger.settle(now_s)
        self.ledger.rate[:] = 0.0

    def state(self, now_s: float) -> dict[str, Any]:
        self.ledger.settle(now_s)
        return {
            "gpu_types": list(self.ledger.gpu_types),
            "since_s": self.since_s,
            "state": self.ledger.state(),
            "supply": [list(change) for change in self._supply],
        }
