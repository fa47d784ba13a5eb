"""Which configuration to measure next: the one that reduces the uncertainty of the speed table most.

With A = Xᵀ X of the fit and relative rows t (of the table) and c (of a candidate), measuring c turns A⁻¹ into
A⁻¹ - A⁻¹ c cᵀ A⁻¹ / (1 + cᵀ A⁻¹ c), so the summed variance of the table falls by

    gain(c) = Σ_t (tᵀ A⁻¹ c)² / (1 + cᵀ A⁻¹ c)      (in units of the noise squared).

This is the V-optimal choice of one more experiment. Candidates may have a cost (GPU-seconds of the trial);
then gain per cost decides.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shoal.knowledge.speed_fit import SpeedFit, is_config
from shoal.knowledge.speed_models import Floats
from shoal.knowledge.unknown import Unknown


@dataclass(frozen=True, slots=True)
class NextSample:
    """The candidate to measure, and the fraction of the table's summed variance that it removes."""

    index: int
    variance_removed: float


def next_sample(
    fit: SpeedFit, candidates: Floats, table: Floats, cost: Floats | None = None
) -> NextSample | Unknown:
    """Choose the candidate whose measurement improves the predictions for `table` most."""
    if len(candidates) == 0 or len(table) == 0:
        return Unknown("there is no configuration to choose from")
    if not is_config(candidates).all() or not is_config(table).all():
        return Unknown("configurations must be positive numbers")
    gains, total = variance_gains(fit, candidates, table)
    if cost is not None:
        if len(cost) != len(candidates):
            return Unknown(f"there are {len(candidates)} candidates but {len(cost)} costs")
        if not bool(np.all(np.isfinite(cost) & (cost > 0))):
            return Unknown("a trial's cost must be a positive number")
    best = best_of(gains, cost)
    return NextSample(best, float(gains[best] / total) if total > 0 else 0.0)


def best_of(gains: Floats, cost: Floats | None = None) -> int:
    """The candidate with the largest gain, or the largest gain per cost."""
    return int(np.argmax(gains if cost is None else gains / cost))


def variance_gains(fit: SpeedFit, candidates: Floats, table: Floats) -> tuple[Floats, float]:
    """The decrease of the table's summed variance for each candidate, and the present sum."""
    tried = _relative_rows(fit, candidates)
    wanted = _relative_rows(fit, table)
    spread = np.linalg.solve(fit.information, tried.T)
    # The sum of (wanted @ spread)^2 over the table, without a matrix of table times candidates.
    gains = np.sum(spread * (wanted.T @ wanted @ spread), axis=0) / (1.0 + np.sum(tried * spread.T, axis=1))
    total = float(np.sum(wanted * np.linalg.solve(fit.information, wanted.T).T))
    return gains, total


def _relative_rows(fit: SpeedFit, configs: Floats) -> Floats:
    return fit.model.rows(configs) / fit.seconds(configs)[:, None]
