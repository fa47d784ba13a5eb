"""The fairness ledger of a live cluster. It continues over restarts and is updated after every decision."""

from __future__ import annotations

from typing import Any

import numpy as np

from shoal.core.cluster import Cluster
from shoal.core.ledger import Ledger
from shoal.scheduler.scheduler import Scheduler


class LiveLedger:
    def __init__(self, saved: dict[str, Any] | None, cluster: Cluster, now_s: float) -> None:
        """`saved` is of the last server; another set of GPU types begins anew."""
        types = cluster.gpu_types
        if saved and saved.get("gpu_types") == list(types):
            self.ledger, self.since_s = Ledger.restored(saved["state"], types), float(saved["since_s"])
            self.ledger.settle(now_s)
        else:
            self.ledger, self.since_s = Ledger((), types, start_s=now_s), now_s

    def observe(self, scheduler: Scheduler, now_s: float) -> None:
        """What everybody has and is due from now on."""
        users = scheduler.cluster.users
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

    def state(self, now_s: float) -> dict[str, Any]:
        self.ledger.settle(now_s)
        return {
            "gpu_types": list(self.ledger.gpu_types),
            "since_s": self.since_s,
            "state": self.ledger.state(),
        }
