"""Fit of a job's speed: non-negative least squares with relative weights (Optimus, EuroSys'18, section 3.2).

With measured seconds T_i of configurations with design rows x_i (see `speed_models`), θ minimises

    Σ_i ((x_i θ - T_i) / T_i)²  +  λ Σ_j (s_j θ_j - q_j)²        subject to θ >= 0.

Dividing by T_i makes errors relative: otherwise slow configurations would dominate. The second sum is our
addition: s_j is the mean of x_ij / T_i, so s_j θ_j is the fraction of a step that term j takes, and q_j is the
fraction assumed before any measurement. λ counts as that many measurements, so its influence decreases as points
arrive. With few points, it prevents a fit that explains everything by one term and predicts steps of almost zero
length elsewhere. For the same reason θ_j >= 0.01 q_j / s_j if λ > 0.

If a `prior` is given (coefficients up to their scale, see `speed_prior`), it replaces the second sum. With the m
`reference` rows x_k, and c such that the prior matches the measurements on (geometric) average, the fit minimises

    Σ_i ((x_i θ - T_i) / T_i)²  +  λ/m Σ_k ((x_k θ - c x_k p) / (c x_k p))²  +  ρ Σ_j (s_j (θ_j - c p_j))².

So the prior counts as λ measurements of the whole curve. A single measured size fits c p exactly: the curve is then
the prior, scaled to the measurement. ρ only keeps the problem well-posed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from shoal.knowledge.speed_models import Floats, SpeedModel
from shoal.knowledge.unknown import Unknown

# Prior of the noise: a measurement is assumed to be 10 % off, with the weight of three measurements.
_USUAL_NOISE = 0.1
_USUAL_NOISE_WORTH = 3
# A prior curve counts as this many measurements (λ), and its coefficients as this many (ρ). On 40 measured scaling
# curves, 90 % intervals then contain 84 to 98 % of the true speeds after 1, 2, 3 and 5 sizes.
_PRIOR_WORTH = 0.03
_PRIOR_TERMS_WORTH = 0.01
# Part of the noise (as a variance) that is the model's own error at a configuration.
_MISFIT = 0.5
# No term is ruled out entirely: it keeps at least this fraction of its assumed share.
_LEAST_PART = 0.01


@dataclass(frozen=True, slots=True, eq=False)
class SpeedFit:
    """Fitted coefficients and their uncertainty.

    `information` is Xᵀ X of the weighted problem, including the assumed shares. `noise` is the relative standard
    deviation of a measurement from the model, which includes the misfit of the model itself.
    """

    model: SpeedModel
    theta: Floats
    information: Floats
    noise: float
    points: int

    def seconds(self, configs: Floats) -> Floats:
        """Predicted seconds per step of each configuration (one per row)."""
        return self.model.rows(configs) @ self.theta

    def steps_per_s(self, configs: Floats) -> Floats:
        return 1.0 / self.seconds(configs)

    def relative_std(self, configs: Floats) -> Floats:
        """Standard deviation of the true time, as a fraction of the predicted one: noise · sqrt(x (XᵀX)⁻¹ xᵀ + 1/2).

        x is relative to x θ. The first term is the uncertainty of the coefficients. The second is the error of the
        model at one configuration, which is taken to be half of the noise (see bench/knowledge_sizes.py).
        """
        relative = self.model.rows(configs) / self.seconds(configs)[:, None]
        spread = np.linalg.solve(self.information, relative.T)
        of_terms = np.maximum(np.sum(relative * spread.T, axis=1), 0.0)
        return np.asarray(self.noise * np.sqrt(of_terms + _MISFIT))


#: Limit for configurations and seconds per step (and 1 / limit for the shortest step).
_MOST = 1e12


def is_duration(seconds: Floats) -> NDArray[np.bool_]:
    """Which of these are valid seconds per step."""
    return (seconds > 1 / _MOST) & (seconds < _MOST)


def is_config(configs: Floats) -> NDArray[np.bool_]:
    """Which of these rows are valid configurations."""
    return np.asarray(((configs > 0) & (configs < _MOST)).all(axis=1))


def fit_speed(
    model: SpeedModel,
    configs: Floats,
    seconds: Floats,
    *,
    min_points: int | None = None,
    reference: Floats | None = None,
    ridge: float | None = None,
    prior: Floats | None = None,
) -> SpeedFit | Unknown:
    """Fit `model` to measured seconds per step.

    Invalid rows (not finite or not positive) are ignored. `min_points` distinct configurations are required,
    by default as many as there are coefficients. `reference` rows give the scale of terms that no measured
    configuration contains (such as communication, if only one GPU was measured). A `prior` needs them too.
    """
    configs = np.asarray(configs, dtype=np.float64).reshape(-1, len(model.columns))
    seconds = np.asarray(seconds, dtype=np.float64).reshape(-1)
    if len(configs) != len(seconds):
        return Unknown(f"there are {len(configs)} configurations but {len(seconds)} times")
    usable = is_duration(seconds) & is_config(configs)
    configs, seconds = configs[usable], seconds[usable]
    wanted = len(model.terms) if min_points is None else min_points
    distinct = len(np.unique(configs, axis=0))
    if distinct < max(wanted, 1):
        left_out = int(np.count_nonzero(~usable))
        also = f" ({left_out} unusable measurements left out)" if left_out else ""
        return Unknown(f"{distinct} distinct configurations are measured and {wanted} are needed{also}")
    if prior is not None and reference is not None:
        return _solve_with_prior(model, configs, seconds, reference, prior)
    return _solve(model, configs, seconds, reference, model.ridge if ridge is None else ridge)


def _solve_with_prior(
    model: SpeedModel, configs: Floats, seconds: Floats, reference: Floats, prior: Floats
) -> SpeedFit:
    factor = float(np.exp(np.mean(np.log(seconds / (model.rows(configs) @ prior)))))
    expected = factor * prior
    curve = model.rows(reference)
    curve = curve / (curve @ expected)[:, None]
    scale = curve.mean(axis=0)
    scale = np.where(scale > 0, scale, 1.0)
    weight, terms = np.sqrt(_PRIOR_WORTH / len(curve)), np.sqrt(_PRIOR_TERMS_WORTH) * np.diag(scale)
    weighted = model.rows(configs) / seconds[:, None]
    matrix = np.vstack([weighted, weight * curve, terms])
    target = np.concatenate([np.ones(len(seconds)), np.full(len(curve), weight), terms @ expected])
    return _fit_above(model, matrix, target, weighted, _LEAST_PART * expected)


def _solve(
    model: SpeedModel, configs: Floats, seconds: Floats, reference: Floats | None, ridge: float
) -> SpeedFit:
    weighted = model.rows(configs) / seconds[:, None]
    scale = weighted.mean(axis=0)
    shares = np.asarray(model.shares)
    measured = scale > 0
    if reference is not None and not measured.all():
        scale = np.where(measured, scale, model.rows(reference).mean(axis=0) / seconds.mean())
    shares = np.where(measured, shares / shares[measured].sum(), shares)
    # A term without any information gets scale one and coefficient zero.
    shares = np.where(scale > 0, shares, 0.0)
    scale = np.where(scale > 0, scale, 1.0)
    strength = np.sqrt(max(ridge, 1e-9))
    matrix = np.vstack([weighted, strength * np.diag(scale)])
    target = np.concatenate([np.ones(len(seconds)), strength * shares])
    least = _LEAST_PART * shares / scale if ridge > 0 else np.zeros_like(scale)
    return _fit_above(model, matrix, target, weighted, least)


def _fit_above(
    model: SpeedModel, matrix: Floats, target: Floats, weighted: Floats, least: Floats
) -> SpeedFit:
    """Solve for coefficients of at least `least`; `weighted` are the rows of the measurements in `matrix`."""
    above, _ = nnls(matrix, target - matrix @ least)
    theta = least + above
    residual = weighted @ theta - 1.0
    free = max(len(weighted) - int(np.count_nonzero(above)), 0)
    squares = float(residual @ residual) + _USUAL_NOISE_WORTH * _USUAL_NOISE**2
    noise = float(np.sqrt(squares / (free + _USUAL_NOISE_WORTH)))
    return SpeedFit(model, theta, matrix.T @ matrix, noise, len(weighted))
