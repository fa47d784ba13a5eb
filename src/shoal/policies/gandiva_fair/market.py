"""The users' shares of each GPU type, by tickets and after trading, with a record of the trades."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np

from shoal.core.arrays import FloatArray, IntArray
from shoal.core.ledger import entitlement
from shoal.policies.gandiva_fair.trading import Trade, trade, type_order


def _alike(one: list[Trade], other: list[Trade]) -> bool:
    """Whether two rounds of trades are equal except for rounding."""
    return len(one) == len(other) and all(
        (a.buyer, a.seller, a.fast, a.slow) == (b.buyer, b.seller, b.fast, b.slow)
        and abs(a.price - b.price) < 1e-6
        and abs(a.fast_gpus - b.fast_gpus) < 1e-6
        for a, b in zip(one, other)
    )


class Market:
    """Recomputes shares when users, tickets, demand, speeds or GPUs change, and records the rounds of trades."""

    def __init__(self, *, trading: bool, keep_rounds: int) -> None:
        self.trading = trading
        self.keep_rounds = keep_rounds
        self.entitled: FloatArray = np.zeros((0, 0))
        self.weights: FloatArray = np.zeros((0, 0))
        self.trades: list[Trade] = []
        self.rounds: list[dict[str, Any]] = []
        self._seen = b""

    def update(
        self,
        tickets: FloatArray,
        demand: FloatArray,
        may_use: FloatArray,
        speed: FloatArray,
        gpus_of_type: IntArray,
        now_s: float,
    ) -> None:
        """Compute the shares of users with `demand`. `speed[user, type]` is nan where it is unknown."""
        gpus = gpus_of_type.astype(np.float64)
        seen = b"".join(a.tobytes() for a in (tickets, demand, may_use, speed, gpus))
        if seen == self._seen:
            return
        self._seen = seen
        mixed = len(gpus) > 1
        slow_first = type_order(speed) if mixed else np.zeros(1, np.int64)
        self.entitled = entitlement(tickets, demand, may_use, gpus, slow_first[::-1].astype(np.int32))
        if not (mixed and self.trading):
            self.weights = self.entitled
            return
        self.weights, trades = trade(self.entitled, speed, slow_first.tolist(), demand)
        if not _alike(trades, self.trades):
            self.trades = trades
            self.rounds.append({"time_s": now_s, "trades": trades})
            del self.rounds[: -self.keep_rounds]

    def close(self, users: int, types: int) -> None:
        """No user has jobs, so all shares are zero."""
        self.entitled = self.weights = np.zeros((users, types))
        self._seen = b""

    def report(self, users: tuple[str, ...], gpu_types: tuple[str, ...]) -> list[dict[str, Any]]:
        """All rounds of trades, with names. Each is valid from `time_s` to `until_s`; the last one has no end."""

        def named(t: Trade) -> dict[str, Any]:
            return {
                **asdict(t),
                "buyer": users[t.buyer],
                "seller": users[t.seller],
                "fast": gpu_types[t.fast],
                "slow": gpu_types[t.slow],
            }

        ends = [*(r["time_s"] for r in self.rounds[1:]), None]
        return [
            {"time_s": r["time_s"], "until_s": until_s, "trades": [named(t) for t in r["trades"]]}
            for r, until_s in zip(self.rounds, ends)
        ]

    def state(self) -> dict[str, Any]:
        return {
            "rounds": [
                {"time_s": r["time_s"], "trades": [asdict(t) for t in r["trades"]]} for r in self.rounds
            ]
        }

    def restore(self, state: dict[str, Any]) -> None:
        self.rounds = [
            {"time_s": r["time_s"], "trades": [Trade(**t) for t in r["trades"]]} for r in state["rounds"]
        ]
        self.trades = self.rounds[-1]["trades"] if self.rounds else []
        self._seen = b""
