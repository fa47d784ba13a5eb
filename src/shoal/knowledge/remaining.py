"""The remaining steps until a job's goal, predicted from its loss curve, and an online estimator of them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.special import ndtr

from shoal.knowledge.convergence import MIN_POINTS, NEWER, CurveFit, LossCurve, fit_curve, replace_outliers
from shoal.knowledge.counts import is_count
from shoal.knowledge.speed_models import Floats
from shoal.knowledge.unknown import Unknown

#: Limit for steps and fractions: their squares must stay finite.
_MOST = 1e100
#: Epochs to simulate until a run of small drops is complete, and how many of them before the curve is flat enough.
_MOST_EPOCHS, _LOOK_BACK = 400, 50
_QUANTILES = (0.05, 0.5, 0.95)
_UNEVEN_EPOCHS = 0.1


@dataclass(frozen=True, slots=True)
class LossAtMost:
    """Goal: the loss falls to this value."""

    loss: float


@dataclass(frozen=True, slots=True)
class DropBelow:
    """Goal: convergence as Optimus defines it.

    The loss falls by less than a fraction of its largest value per epoch, for several consecutive epochs.
    """

    fraction: float
    epochs: int
    steps_per_epoch: float


Goal = LossAtMost | DropBelow


@dataclass(frozen=True, slots=True)
class Remaining:
    """The remaining steps, and their interval with about 90 % confidence if the model holds."""

    steps: float
    low_steps: float
    high_steps: float
    curve: LossCurve


def remaining_steps(fit: CurveFit, now_step: float, goal: Goal) -> Remaining | Unknown:
    """The steps from `now_step` until the fitted curve reaches the goal."""
    best = fit.best
    if not 0 <= now_step < _MOST:
        return Unknown(f"a job cannot be at step {now_step}")
    if isinstance(goal, LossAtMost):
        if not math.isfinite(goal.loss):
            return Unknown(f"the goal {goal.loss} is not a loss")
        if goal.loss <= best.floor and goal.loss < float(best.loss(now_step)):
            return Unknown(f"the curve levels off at {best.floor:.4g}, above the goal of {goal.loss:.4g}")
        centre, low, high = _steps_to_loss(fit, goal.loss)
    else:
        if not (goal.fraction > 0 and goal.steps_per_epoch > 0 and goal.epochs >= 0):
            return Unknown("the goal's fraction and steps per epoch must be above 0")
        few = is_count(goal.epochs, 0, _MOST_EPOCHS)
        if not (goal.fraction < _MOST and goal.steps_per_epoch < _MOST and few):
            return Unknown(f"the goal must be finite, of at most {_MOST_EPOCHS} epochs in a row")
        centre, low, high = _steps_to_small_drop(fit, goal)
        if not math.isfinite(centre):
            return Unknown(
                f"noise breaks every row of {goal.epochs} small drops: "
                f"in {_MOST_EPOCHS} epochs more there may be none"
            )
    left = max(centre - now_step, 0.0)
    return Remaining(left, max(min(low - now_step, left), 0.0), max(high - now_step, left), best)


def _steps_to_loss(fit: CurveFit, loss: float) -> tuple[float, float, float]:
    """k = a / (L - β2) - c and its interval, by its gradient (1/d, a/d²) with d = L - β2."""
    best, loss = fit.best, min(loss, 1e100)  # beyond all losses; its square is still a number
    centre = best.amplitude / (loss - best.floor) - best.shift if loss > best.floor else 0.0
    distance = loss - fit.floors
    reachable = distance > 0
    safe = np.where(reachable, distance, 1.0)
    steps = fit.amplitudes / safe - fit.shifts
    by_a, by_floor = 1.0 / safe, fit.amplitudes / safe**2
    spread = fit.reach * _std(fit, by_a, by_floor)
    # The linear approximation in β2 fails if the floor may be at the goal: then there is no upper bound.
    floor_reach = fit.reach * np.sqrt(fit.covariance[:, 2])
    ends = np.where(reachable & (floor_reach < distance), steps + spread, np.inf)
    starts = np.where(reachable, steps - spread, np.inf)
    return centre, float(starts.min()), float(ends.max())


def _steps_to_small_drop(fit: CurveFit, goal: DropBelow) -> tuple[float, float, float]:
    """The median and the 90 % interval of the step at which a run of small drops is complete.

    The fitted curve falls by less than δ (fraction of the largest loss) per epoch of e steps from the k with

        a e / ((k+c)(k+c+e)) = δ.

    The goal, however, is defined on measured losses. A measured drop is small with probability Φ((δ - d)/σ),
    where d is the drop of the curve and σ the noise so far, so noise may interrupt a run several times. The
    length of the run is a Markov chain, simulated epoch by epoch from the last measured losses.
    """
    epoch, limit = float(goal.steps_per_epoch), goal.fraction * fit.largest_loss

    def curve_steps(amplitude: Floats, shift: Floats) -> Floats:
        return (np.sqrt(epoch**2 + 4 * amplitude * epoch / limit) - epoch) / 2 - shift

    start, row = float(fit.steps[-1]), _row_so_far(fit, goal, limit)
    crossing = float(curve_steps(np.array(fit.best.amplitude), np.array(fit.best.shift)))
    far = max(int((crossing - start) / epoch) - _LOOK_BACK, 0)
    if far:  # the run cannot be complete for a long time: start close to where it can
        start, row = start + far * epoch, 0
    low, median, high = start + epoch * _epochs_until_row(fit, goal, start, row, limit)
    # The curve itself is uncertain: the run may begin where other plausible curves become flat enough.
    steps = curve_steps(fit.amplitudes, fit.shifts)
    by_a = epoch / limit / np.sqrt(epoch**2 + 4 * fit.amplitudes * epoch / limit)
    spread = fit.reach * _std(fit, by_a, np.zeros_like(by_a))
    earlier = max(crossing - float((steps - spread).min()), 0.0)
    later = max(float((steps + spread).max()) - max(crossing, start), 0.0)
    soonest = float(fit.steps[-1]) + max(goal.epochs - row, 1) * epoch
    # Epochs do not all have the same number of steps, which widens the interval.
    uneven = _UNEVEN_EPOCHS * epoch
    return median, max(low - earlier, min(soonest, low)) - uneven, high + later + uneven


def _row_so_far(fit: CurveFit, goal: DropBelow, limit: float) -> int:
    """How many of the last drops per epoch were small; at most one less than the goal requires."""
    at = fit.steps[-1] - float(goal.steps_per_epoch) * np.arange(goal.epochs)
    seen = at >= fit.steps[0] - 1e-9
    losses = np.interp(at[seen], fit.steps, fit.losses)
    small = losses[1:] - losses[:-1] < limit
    return int(np.argmin(np.append(small, False)))


def _drop_noise(fit: CurveFit) -> float:
    """Root mean square difference of measured drops from the curve's, over the newer two thirds."""
    off = np.diff(replace_outliers(fit.losses) - fit.best.loss(fit.steps))
    newer = off[-max(2 * len(off) // 3, 4) :]
    return max(float(np.sqrt(np.mean(newer * newer))), 1e-9 * fit.largest_loss)


def _epochs_until_row(fit: CurveFit, goal: DropBelow, start: float, row: int, limit: float) -> Floats:
    """5 %, 50 % and 95 % quantiles of the epochs from `start` until the run of small drops is complete."""
    losses = fit.best.loss(start + goal.steps_per_epoch * np.arange(_MOST_EPOCHS + 1.0))
    small = ndtr((limit + np.diff(losses)) / _drop_noise(fit))
    in_row = np.zeros(max(goal.epochs, 1))
    in_row[min(row, len(in_row) - 1)] = 1.0
    done = np.zeros(_MOST_EPOCHS + 1)
    for i, p in enumerate(small):
        done[i + 1] = done[i] + p * in_row[-1]
        in_row = np.concatenate([[(1 - p) * in_row.sum()], p * in_row[:-1]])
        if done[i + 1] > _QUANTILES[-1]:
            done[i + 2 :] = 1.0
            break
    reached = np.searchsorted(done, _QUANTILES).astype(np.float64)
    return np.where(reached > _MOST_EPOCHS, np.inf, reached)


def _std(fit: CurveFit, by_a: Floats, by_floor: Floats) -> Floats:
    var_a, cov, var_floor = fit.covariance.T
    variance = by_a**2 * var_a + 2 * by_a * by_floor * cov + by_floor**2 * var_floor
    return np.asarray(np.sqrt(np.maximum(variance, 0.0)))


class ConvergenceEstimator:
    """Estimates the remaining steps from the (step, loss) points that a job logs.

    The history is bounded: when it is full, neighbouring points are merged into their mean, so the cost does
    not grow with the length of training. A step at or before the last one means that the job restarted from
    a checkpoint; later points are then discarded.
    """

    __slots__ = ("_bad_step", "_losses", "_steps", "capacity", "min_points", "newer")

    def __init__(self, *, capacity: int = 128, min_points: int = MIN_POINTS, newer: float = NEWER) -> None:
        if capacity < 2 * min_points:
            raise ValueError("capacity must be at least twice min_points")
        self.capacity = capacity
        self.min_points = min_points
        self.newer = newer
        self._steps: list[float] = []
        self._losses: list[float] = []
        self._bad_step: float | None = None

    def observe(self, step: float, loss: float) -> Unknown | None:
        """Add one point. An invalid one is ignored and the reason returned."""
        if not (math.isfinite(step) and step >= 0):
            return Unknown(f"{step} is not a step")
        if not math.isfinite(loss):
            self._bad_step = step
            return Unknown(f"the loss at step {step:.0f} is {loss}")
        self._bad_step = None
        while self._steps and self._steps[-1] >= step:
            self._steps.pop()
            self._losses.pop()
        self._steps.append(float(step))
        self._losses.append(float(loss))
        if len(self._steps) > self.capacity:
            self._merge_neighbours()
        return None

    def fit(self) -> CurveFit | Unknown:
        if self._bad_step is not None:
            return Unknown(f"the loss at step {self._bad_step:.0f} was not a number: the job may diverge")
        return fit_curve(
            np.array(self._steps), np.array(self._losses), newer=self.newer, min_points=self.min_points
        )

    def remaining(self, goal: Goal, now_step: float | None = None) -> Remaining | Unknown:
        """Steps from `now_step` (by default the last one logged) until the goal."""
        fit = self.fit()
        if isinstance(fit, Unknown):
            return fit
        return remaining_steps(fit, self._steps[-1] if now_step is None else now_step, goal)

    def to_dict(self) -> dict[str, Any]:
        return {
            "capacity": self.capacity,
            "min_points": self.min_points,
            "newer": self.newer,
            "steps": list(self._steps),
            "losses": list(self._losses),
            "bad_step": self._bad_step,
        }

    @classmethod
    def from_dict(cls, state: dict[str, Any]) -> ConvergenceEstimator:
        estimator = cls(capacity=state["capacity"], min_points=state["min_points"], newer=state["newer"])
        estimator._steps = list(state["steps"])
        estimator._losses = list(state["losses"])
        estimator._bad_step = state["bad_step"]
        return estimator

    def _merge_neighbours(self) -> None:
        """Halve the number of points in the older half of the history; the newest points are kept."""
        older = (len(self._steps) // 4) * 2
        steps, losses = np.array(self._steps[:older]), np.array(self._losses[:older])
        self._steps = [*steps.reshape(-1, 2).mean(axis=1).tolist(), *self._steps[older:]]
        self._losses = [*losses.reshape(-1, 2).mean(axis=1).tolist(), *self._losses[older:]]
