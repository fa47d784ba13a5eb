"""Weighted water-filling: shares of a common supply when some users can use less than their proportional share.

With weights w, demands d and a supply N, the share of i is min(d_i, w_i * level). The level is such that the shares add
up to N, or to the total demand if that is less. What a user cannot use goes to the others in proportion to their
weights: weighted max-min fairness (Chaudhary et al., EuroSys'20, section 2).
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import TypeVar

from shoal.core.arrays import FloatArray
from shoal.core.compiled import kernel
from shoal.core.errors import ShoalError

Number = TypeVar("Number", float, Fraction)


def water_fill(weights: Sequence[Number], demand: Sequence[Number], supply: Number) -> list[Number]:
    """The share of each, exact if the numbers are exact.

    Example: 8 GPUs, equal tickets, demands 4, 4 and 2. The third can use only 2 of its 8/3, so the others get 3.
    """
    _check(weights, demand, supply)
    share: list[Number] = [supply * 0] * len(weights)
    unmet = [i for i, d in enumerate(demand) if d > 0]
    left = supply
    while unmet and left > 0:
        total = sum(weights[i] for i in unmet)
        full = [i for i in unmet if demand[i] * total <= left * weights[i]]
        if not full:
            for i in unmet:
                share[i] = left * weights[i] / total
            break
        for i in full:
            share[i] = demand[i]
            left -= demand[i]
        unmet = [i for i in unmet if i not in full]
    return share


def _check(weights: Sequence[Number], demand: Sequence[Number], supply: Number) -> None:
    if len(weights) != len(demand):
        raise ShoalError(f"{len(weights)} weights for {len(demand)} demands; give one of each per user")
    for i, weight in enumerate(weights):
        if not weight > 0:
            raise ShoalError(f"weight {i} is {weight}; give a positive number of tickets")
    if any(d < 0 for d in demand) or supply < 0:
        raise ShoalError("demand and supply cannot be negative")


@kernel
def water_fill_into(weights: FloatArray, demand: FloatArray, supply: float, share: FloatArray) -> None:
    """`water_fill` in floats, into `share`. Users without weight are served last and equally."""
    n = len(weights)
    left = supply
    for positive in (True, False):
        for i in range(n):
            if (weights[i] > 0.0) == positive:
                share[i] = -1.0 if demand[i] > 0.0 else 0.0
        while left > 0.0:
            total = 0.0
            for i in range(n):
                if share[i] < 0.0 and (weights[i] > 0.0) == positive:
                    total += weights[i] if positive else 1.0
            if total == 0.0:
                break
            level = left / total
            any_full = False
            for i in range(n):
                if share[i] < 0.0 and (weights[i] > 0.0) == positive:
                    weight = weights[i] if positive else 1.0
                    if demand[i] <= level * weight:
                        share[i] = demand[i]
                        left -= demand[i]
                        any_full = True
            if not any_full:
                for i in range(n):
                    if share[i] < 0.0 and (weights[i] > 0.0) == positive:
                        share[i] = level * (weights[i] if positive else 1.0)
                left = 0.0
        for i in range(n):
            if share[i] < 0.0 and (weights[i] > 0.0) == positive:
                share[i] = 0.0
