"""Automated trading: users exchange GPUs of different types at the second price.

Every user starts with its ticket share of each GPU type. For each pair of types, the user with the highest speed-up
buys GPUs of the faster type from the user with the lowest speed-up, for p GPUs of the slower type each. Both gain if p
lies between their speed-ups. As in a Vickrey auction, the price p is the second-highest speed-up: the buyer's own
report decides whether it buys, not what it pays (Chaudhary et al., EuroSys'20, Algorithm 2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shoal.core.arrays import FloatArray
from shoal.core.compiled import inner, kernel
from shoal.core.errors import ShoalError

#: Trades of fewer GPUs are rounding errors.
LEAST_GPUS = 1e-9


@dataclass(frozen=True, slots=True)
class Trade:
    """`buyer` gets `fast_gpus` of type `fast` from `seller` for `slow_gpus` = price * fast_gpus of `slow`.

    Gains are in GPUs of the slow type: the throughput that each gains, in units of its own speed on that type.
    """

    buyer: int
    seller: int
    fast: int
    slow: int
    price: float
    fast_gpus: float
    slow_gpus: float
    buyer_gain: float
    seller_gain: float


def trade(
    shares: FloatArray,
    speed: FloatArray,
    slow_to_fast: Sequence[int] | None = None,
    demand: FloatArray | None = None,
) -> tuple[FloatArray, list[Trade]]:
    """(shares after trading, the trades). `shares[user, type]` in GPUs; `speed[user, type]` of one GPU, nan
    if unknown. A user without a speed for a type neither buys nor sells it.

    `slow_to_fast` orders the types (default: by the mean of their speeds). `demand[user]` is the number of GPUs that a
    user can use in all. No user sells fast GPUs for more slow ones than that.
    """
    shares = np.ascontiguousarray(shares, np.float64)
    speed = np.ascontiguousarray(speed, np.float64)
    if shares.shape != speed.shape:
        raise ShoalError(
            f"shares are for {shares.shape} (users, types) and speeds for {speed.shape}; give both for all"
        )
    if (speed <= 0).any() or np.isinf(speed).any() or not (shares >= 0).all():
        raise ShoalError("a speed must be positive, or nan where it is unknown, and no share below 0")
    order = type_order(speed) if slow_to_fast is None else np.asarray(slow_to_fast, np.int64)
    room = np.full(len(shares), np.inf) if demand is None else demand - shares.sum(axis=1)
    after, log = trade_all(shares.copy(), speed, order, np.maximum(room, 0.0))
    return after, [_record(row, speed) for row in log]


def _record(row: FloatArray, speed: FloatArray) -> Trade:
    buyer, seller, fast, slow = (int(x) for x in row[:4])
    price, amount = float(row[4]), float(row[5])
    return Trade(
        buyer,
        seller,
        fast,
        slow,
        price,
        amount,
        price * amount,
        float((speed[buyer, fast] / speed[buyer, slow] - price) * amount),
        float((price - speed[seller, fast] / speed[seller, slow]) * amount),
    )


def type_order(speed: FloatArray) -> NDArray[np.int64]:
    """Types from slow to fast, by the geometric mean of the users' known speeds."""
    known = np.isfinite(speed)
    logs = np.where(known, np.log(np.where(known, speed, 1.0)), 0.0)
    # A user's speeds count relative to its own mean. Otherwise fast models would dominate.
    own = logs.sum(axis=1, keepdims=True) / np.maximum(known.sum(axis=1, keepdims=True), 1)
    mean = np.where(known, logs - own, 0.0).sum(axis=0) / np.maximum(known.sum(axis=0), 1)
    return np.argsort(mean, kind="stable")


@kernel
def trade_all(
    shares: FloatArray, speed: FloatArray, slow_to_fast: NDArray[np.int64], room: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """All trades over all pairs of types. Rows of the log: buyer, seller, fast, slow, price, fast GPUs."""
    users, types = shares.shape
    log = np.empty((64, 6))
    count = 0
    ratio = np.empty(users)
    for a in range(types):
        for b in range(types - 1, a, -1):
            slow, fast = slow_to_fast[a], slow_to_fast[b]
            for u in range(users):
                ratio[u] = speed[u, fast] / speed[u, slow]
            while True:
                buyer, seller, price = _parties(shares, ratio, slow, fast, room)
                if seller < 0:
                    break
                amount = _amount(shares, slow, fast, room, buyer, seller, price)
                if amount <= LEAST_GPUS:
                    break
                _exchange(shares, slow, fast, buyer, seller, price, amount)
                room[seller] -= (price - 1.0) * amount
                room[buyer] += (price - 1.0) * amount
                if count == len(log):
                    longer = np.empty((2 * count, 6))
                    for k in range(count):
                        for c in range(6):
                            longer[k, c] = log[k, c]
                    log = longer
                log[count, 0], log[count, 1], log[count, 2], log[count, 3] = buyer, seller, fast, slow
                log[count, 4], log[count, 5] = price, amount
                count += 1
    return shares, log[:count]


@inner
def _parties(
    shares: FloatArray, ratio: FloatArray, slow: int, fast: int, room: FloatArray
) -> tuple[int, int, float]:
    """(buyer, seller, price) of the next trade; seller -1 if there is none.

    The buyer has the highest speed-up of the users with slow GPUs. The seller has the lowest speed-up of the users with
    fast GPUs, below the buyer's. The price is the highest speed-up after the buyer's.
    """
    buyer, seller, price = -1, -1, -1.0
    for u in range(len(ratio)):
        may_buy = shares[u, slow] > LEAST_GPUS and not np.isnan(ratio[u])
        if may_buy and (buyer < 0 or ratio[u] > ratio[buyer]):
            buyer = u
    if buyer < 0:
        return buyer, seller, price
    for u in range(len(ratio)):
        if u != buyer and ratio[u] <= ratio[buyer] and ratio[u] > price:
            price = ratio[u]
    for u in range(len(ratio)):
        if ratio[u] < ratio[buyer] and shares[u, fast] > LEAST_GPUS:
            full = price > 1.0 and room[u] <= LEAST_GPUS
            if not full and (seller < 0 or ratio[u] < ratio[seller]):
                seller = u
    return buyer, seller, price


@inner
def _amount(
    shares: FloatArray, slow: int, fast: int, room: FloatArray, buyer: int, seller: int, price: float
) -> float:
    """Fast GPUs of the trade: the least of what the seller has, the buyer can pay, and both can use."""
    amount: float = min(shares[seller, fast], shares[buyer, slow] / price)
    if price > 1.0:
        amount = min(amount, room[seller] / (price - 1.0))
    elif price < 1.0:
        amount = min(amount, room[buyer] / (1.0 - price))
    return float(amount)


@inner
def _exchange(
    shares: FloatArray, slow: int, fast: int, buyer: int, seller: int, price: float, amount: float
) -> None:
    shares[seller, fast] -= amount
    shares[buyer, fast] += amount
    shares[buyer, slow] -= price * amount
    shares[seller, slow] += price * amount
    for u in (buyer, seller):  # remove rounding errors
        for t in (slow, fast):
            if abs(shares[u, t]) <= LEAST_GPUS:
                shares[u, t] = 0.0
