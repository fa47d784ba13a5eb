"""How many steps a job still needs: Optimus' convergence curve (EuroSys'18, section 3.1).

    l(k) = 1 / (β0 k + β1) + β2,   β >= 0

SGD converges at O(1/k); the curve is fitted again as losses arrive. Written as

    l(k) = a · 1/(k + c) + β2,   a = 1/β0,   c = β1/β0

the curve is linear in (a, β2) once c is fixed. So c is searched on a line and (a, β2) is a non-negative least
squares problem of two unknowns, solved for all c at once. The usual transformation 1/(l - β2) = β0 k + β1 is
avoided: it needs β2 below every loss, which noise near the end breaks, and it inflates the noise there.

Before fitting, outliers are replaced by their neighbours' mean, losses are divided by the largest one, and
newer points get more weight: by thirds of the history the assumed noise σ halves (`newer` = 2), so each third
weighs 4 times the one before it. The Optimus authors' code has σ = 1/4 per third (`newer` = 4).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.special import fdtri

from shoal.knowledge.speed_models import Floats
from shoal.knowledge.unknown import Unknown

MIN_POINTS = 5  # three coefficients, and two more points to judge the fit
NEWER = 2.0
CONFIDENCE = 0.9
_SEARCH = 48


@dataclass(frozen=True, slots=True)
class LossCurve:
    """A fitted curve, in the losses' own units."""

    amplitude: float
    shift: float
    floor: float
    residual: float
    points: int

    @property
    def beta(self) -> tuple[float, float, float]:
        """(β0, β1, β2) as Optimus writes them."""
        return 1.0 / self.amplitude, self.shift / self.amplitude, self.floor

    def loss(self, step: Floats | float) -> Floats:
        return self.amplitude / (np.asarray(step, dtype=np.float64) + self.shift) + self.floor


@dataclass(frozen=True, slots=True, eq=False)
class CurveFit:
    """The best curve, and all curves of the search that the losses do not rule out, with their uncertainty.

    Arrays have one entry per plausible shift (F-test on the residuals): the profile likelihood along the one
    non-linear coefficient. `covariance` holds var(a), cov(a, β2), var(β2) given the shift. `reach` is the
    number of these standard deviations that lie within the confidence region: the worse the fit, the fewer.
    `steps` and `losses` are the original points.
    """

    best: LossCurve
    largest_loss: float
    shifts: Floats
    amplitudes: Floats
    floors: Floats
    covariance: Floats
    reach: Floats
    steps: Floats
    losses: Floats


def replace_outliers(losses: Floats, reach: int = 2, margin: float = 1.0) -> Floats:
    """Replace a loss that lies outside the range of its neighbours by the neighbours' mean.

    Neighbours are the `reach` points on either side, at the end of the history the 2 `reach` points before.
    Their range is widened on both sides by `margin` times its width, so that ordinary noise and the fall of
    the curve are no outliers (margin 0 is the plain rule). The first points are kept: the fall is steepest there.
    """
    count = len(losses)
    if count < 2 * reach + 1:
        return losses
    around = np.concatenate([np.arange(-reach, 0), np.arange(1, reach + 1)])
    before = np.arange(-2 * reach, 0)
    judged = np.arange(reach, count)
    at_end = judged + reach >= count
    others = losses[judged[:, None] + np.where(at_end[:, None], before, around)]
    low, high = others.min(axis=1), others.max(axis=1)
    slack = margin * (high - low)
    value = losses[judged]
    odd = (value < low - slack) | (value > high + slack)
    cleaned = losses.copy()
    cleaned[judged] = np.where(odd, others.mean(axis=1), value)
    return cleaned


def recency_weights(count: int, newer: float = NEWER) -> Floats:
    """Weights by thirds of the history, the newest heaviest: σ = newer^-third, weight 1/σ²."""
    thirds = (3 * np.arange(count)) // max(count, 1)
    return np.asarray(newer ** (2.0 * (thirds - 2.0)), dtype=np.float64)


def nnls_two(first: Floats, second: Floats, target: Floats, weights: Floats) -> tuple[Floats, Floats, Floats]:
    """Weighted non-negative least squares with two unknowns, for many problems at once.

    Row i of `first` and `second` is problem i's design; `target` is common. Returns the coefficients and the
    weighted sum of squares. The optimum is in the interior, on one axis, or at zero: the best of those is taken.
    """
    aa = np.sum(weights * first * first, axis=1)
    bb = np.sum(weights * second * second, axis=1)
    ab = np.sum(weights * first * second, axis=1)
    ay = np.sum(weights * first * target, axis=1)
    by = np.sum(weights * second * target, axis=1)
    det = aa * bb - ab * ab
    solvable = det > 1e-12 * aa * bb
    safe = np.where(solvable, det, 1.0)
    a, b = (bb * ay - ab * by) / safe, (aa * by - ab * ay) / safe
    interior = solvable & (a >= 0) & (b >= 0)
    only_a, only_b = np.maximum(ay / aa, 0.0), np.maximum(by / bb, 0.0)
    a_wins = only_a * ay >= only_b * by  # the fall of the sum of squares on each axis
    a = np.where(interior, a, np.where(a_wins, only_a, 0.0))
    b = np.where(interior, b, np.where(a_wins, 0.0, only_b))
    residual = target - a[:, None] * first - b[:, None] * second
    return a, b, np.sum(weights * residual * residual, axis=1)


#: A loss or a step beyond this is invalid: the job has diverged.
_MOST = 1e100


def fit_curve(
    steps: Floats, losses: Floats, *, newer: float = NEWER, min_points: int = MIN_POINTS
) -> CurveFit | Unknown:
    """Fit the curve to (step, loss) points in order of steps; Unknown if they do not determine one."""
    steps = np.asarray(steps, dtype=np.float64)
    losses = np.asarray(losses, dtype=np.float64)
    if steps.ndim != 1 or losses.ndim != 1:
        return Unknown("steps and losses must be one number each")
    losses = np.where(np.abs(losses) < _MOST, losses, np.where(losses > 0, np.inf, losses))
    trouble = _unusable(steps, losses, min_points)
    if trouble is not None:
        return trouble
    finite = np.isfinite(losses)
    steps, losses = steps[finite], losses[finite]
    cleaned = replace_outliers(losses)
    largest = float(cleaned.max())  # without outliers: a single spike must not set the scale
    if largest <= 0:
        return Unknown("apart from outliers all losses are 0: they show no progress")
    cleaned = cleaned / largest
    weights = recency_weights(len(cleaned), newer)
    weights *= weights.sum() / np.sum(weights * weights)  # they sum to the effective number of points
    rising = _rising(steps, cleaned, weights)
    if rising is not None:
        return rising
    shifts, a, b, squares = _search_shift(steps, cleaned, weights)
    best = int(np.argmin(squares))
    if a[best] <= 0:
        return Unknown(f"the loss does not fall: it stays about {b[best] * largest:.4g}")
    return _profile(steps, losses, weights, shifts, a, b, squares, best, largest)


def _unusable(steps: Floats, losses: Floats, min_points: int) -> Unknown | None:
    if len(steps) != len(losses):
        return Unknown(f"there are {len(steps)} steps but {len(losses)} losses")
    if len(losses) and not np.isfinite(losses[-1]):
        return Unknown(f"the loss became {losses[-1]} at step {steps[-1]:.0f}: the job diverges")
    finite = np.isfinite(losses)
    usable = int(np.count_nonzero(finite))
    if usable < min_points:
        return Unknown(f"there are {usable} usable loss points and {min_points} are needed")
    if not (steps < _MOST).all() or steps[0] < 0 or bool(np.any(np.diff(steps) <= 0)):
        return Unknown("steps must be finite, not negative and in increasing order")
    kept = losses[finite]
    if kept.min() < 0:
        return Unknown("the curve 1/(β0 k + β1) + β2 needs losses that are not negative")
    if kept.max() - kept.min() <= 1e-9 * max(kept.max(), 1e-300):
        return Unknown(f"all {usable} losses are equal ({kept[0]:.4g}): they show no progress")
    return None


def _rising(steps: Floats, losses: Floats, weights: Floats) -> Unknown | None:
    """A job diverges if its recent losses exceed the first ones, or rise beyond the noise."""
    tail = max(len(losses) // 3, 3)
    if np.median(losses[-tail:]) > 1.05 * losses[0]:
        return Unknown("the loss is above where it started: the job diverges")
    centre = steps - np.average(steps, weights=weights)
    spread = float(np.sum(weights * centre * centre))
    level = np.average(losses, weights=weights)
    slope = float(np.sum(weights * centre * (losses - level)) / spread)
    residual = losses - level - slope * centre
    error = float(
        np.sqrt(np.sum(weights * residual * residual) / max(float(weights.sum()) - 2.0, 1.0) / spread)
    )
    if slope > 0 and slope > 3.0 * error:
        return Unknown("the loss is rising: the job diverges")
    return None


def _search_shift(steps: Floats, losses: Floats, weights: Floats) -> tuple[Floats, Floats, Floats, Floats]:
    """Try shifts c on a logarithmic grid over the scale of the steps, then once more around the best."""
    span = steps[-1] - steps[0]
    smallest = 1e-4 * span if steps[0] > 0 else 1e-2 * float(np.diff(steps).min())
    grid = np.geomspace(min(smallest, 1e-3 * span), 30.0 * span, _SEARCH)
    ones = np.ones((1, len(steps)))
    coarse = nnls_two(1.0 / (steps + grid[:, None]), ones, losses, weights)
    best = int(np.argmin(coarse[2]))
    fine_grid = np.geomspace(grid[max(best - 1, 0)], grid[min(best + 1, _SEARCH - 1)], _SEARCH)
    fine = nnls_two(1.0 / (steps + fine_grid[:, None]), ones, losses, weights)
    joined = [np.concatenate(pair) for pair in zip((grid, *coarse), (fine_grid, *fine))]
    return joined[0], joined[1], joined[2], joined[3]


def _profile(
    steps: Floats,
    losses: Floats,
    weights: Floats,
    shifts: Floats,
    a: Floats,
    b: Floats,
    squares: Floats,
    best: int,
    largest: float,
) -> CurveFit:
    """Keep the curves that the losses do not rule out: sums of squares up to (1 + F/(n-3)) times the smallest."""
    worth = float(weights.sum())
    free = max(worth - 3.0, 1.0)
    smallest = squares[best] + 1e-15
    budget = float(fdtri(1, free, CONFIDENCE))
    spent = (squares + 1e-15 - smallest) * free / smallest
    plausible = (spent <= budget) & (a > 0)
    inverse = 1.0 / (steps + shifts[plausible, None])
    aa = np.sum(weights * inverse * inverse, axis=1)
    ab = np.sum(weights * inverse, axis=1)
    bb = worth
    variance = smallest / free
    det = np.maximum(aa * bb - ab * ab, 1e-300)
    covariance = np.stack([bb / det, -ab / det, aa / det], axis=1) * variance
    residual = float(np.sqrt(squares[best] / free)) * largest
    curve = LossCurve(
        float(a[best]) * largest, float(shifts[best]), float(b[best]) * largest, residual, len(steps)
    )
    return CurveFit(
        best=curve,
        largest_loss=largest,
        shifts=shifts[plausible],
        amplitudes=a[plausible] * largest,
        floors=b[plausible] * largest,
        covariance=covariance * largest**2,
        reach=np.sqrt(budget - spent[plausible]),
        steps=steps,
        losses=losses,
    )
