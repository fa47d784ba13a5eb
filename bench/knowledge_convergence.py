"""Error of the predicted remaining steps by the progress of the job, on measured and on generated curves.

For each curve and progress, the model is fitted to the points so far and predicts the step of convergence. The error
is |predicted - true| / true of that step, as in Optimus.
"""

from __future__ import annotations

import time

import numpy as np

from knowledge_data import loss_curves, print_json, require_data
from shoal.knowledge.convergence import fit_curve
from shoal.knowledge.remaining import ConvergenceEstimator, DropBelow, Goal, LossAtMost, remaining_steps
from shoal.knowledge.unknown import Unknown

PROGRESS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
FRACTION, EPOCHS = 0.01, 3


def true_drop_goal(steps: np.ndarray, losses: np.ndarray) -> tuple[float, Goal] | None:
    """The step at which the measured loss first fell by < 1 % of its largest value in 3 consecutive epochs."""
    small = -np.diff(losses) / losses.max() < FRACTION
    streak = np.convolve(small, np.ones(EPOCHS), mode="valid") == EPOCHS
    if not streak.any():
        return None
    reached = int(np.argmax(streak)) + EPOCHS
    return steps[reached], DropBelow(FRACTION, EPOCHS, (steps[-1] - steps[0]) / (len(steps) - 1))


def true_loss_goal(steps: np.ndarray, losses: np.ndarray, part: float) -> tuple[float, Goal]:
    """The step at which the loss first made `part` of its whole fall."""
    goal = losses[0] - part * (losses[0] - losses.min())
    return steps[int(np.argmax(losses <= goal))], LossAtMost(float(goal))


def predict(steps: np.ndarray, losses: np.ndarray, goal: Goal, at: float, newer: float):
    seen = int(np.searchsorted(steps, at, side="right"))
    fit = fit_curve(steps[:seen], losses[:seen], newer=newer)
    if isinstance(fit, Unknown):
        return fit
    return remaining_steps(fit, at, goal)


def table(cases: list, newer: float) -> dict:
    rows = {}
    for progress in PROGRESS:
        errors, widths, covered, refused = [], [], 0, 0
        for steps, losses, true_step, goal in cases:
            at = progress * true_step
            answer = predict(steps, losses, goal, at, newer)
            if isinstance(answer, Unknown):
                refused += 1
                continue
            errors.append(abs(at + answer.steps - true_step) / true_step)
            widths.append((answer.high_steps - answer.low_steps) / true_step)
            covered += answer.low_steps <= true_step - at <= answer.high_steps
        rows[str(progress)] = {
            "answered": len(errors),
            "unknown": refused,
            "median_error_percent": round(100 * float(np.median(errors)), 1) if errors else None,
            "mean_error_percent": round(100 * float(np.minimum(errors, 10).mean()), 1) if errors else None,
            "below_20_percent": round(float(np.mean(np.array(errors) < 0.2)), 2) if errors else None,
            "interval_holds": round(covered / len(errors), 2) if errors else None,
            "median_interval_percent": _percent(np.median(widths)) if errors else None,
        }
    return rows


def _percent(part: float) -> float | None:
    return round(100 * float(part), 1) if np.isfinite(part) else None


def pooled_coverage(cases: list, newer: float = 2.0) -> dict:
    """Over all answers: how often the 90 % interval contains the true value, and on which side it fails."""
    inside = below = above = 0
    for progress in PROGRESS:
        for steps, losses, true_step, goal in cases:
            at = progress * true_step
            answer = predict(steps, losses, goal, at, newer)
            if not isinstance(answer, Unknown):
                left = true_step - at
                below += left < answer.low_steps
                above += left > answer.high_steps
                inside += answer.low_steps <= left <= answer.high_steps
    answers = inside + below + above
    return {
        "answers": int(answers),
        "holds": round(float(inside / answers), 3),
        "truth_is_sooner": round(float(below / answers), 3),
        "truth_is_later": round(float(above / answers), 3),
    }


def measured_cases() -> dict[str, list]:
    drop, loss = [], []
    for _, steps, losses in loss_curves():
        found = true_drop_goal(steps, losses)
        if found is not None:
            drop.append((steps, losses, *found))
        loss.append((steps, losses, *true_loss_goal(steps, losses, 0.9)))
    return {"drop_below_1_percent_for_3_epochs": drop, "90_percent_of_the_whole_fall": loss}


def generated_cases(rng: np.random.Generator, noise: float, count: int = 100) -> list:
    """Curves of Optimus' form with a few outliers; the goal is a loss 10 % of the fall above the floor."""
    cases = []
    for _ in range(count):
        shift, floor = rng.uniform(5, 60), rng.uniform(0.05, 0.6)
        amplitude = shift * (1.0 - floor)
        goal = floor + 0.1 * (1.0 - floor)
        true_step = amplitude / (goal - floor) - shift
        steps = np.linspace(1, true_step, 200)
        losses = amplitude / (steps + shift) + floor
        noisy = losses * (1 + rng.normal(0, noise, len(steps)))
        wild = rng.random(len(steps)) < 0.01
        cases.append((steps, np.where(wild, noisy * 2, noisy), true_step, LossAtMost(goal)))
    return cases


def generated_drop_cases(rng: np.random.Generator, noise: float, count: int = 100) -> list:
    """Curves of Optimus' form with one noisy loss per epoch, evaluated like the measured ones."""
    cases = []
    while len(cases) < count:
        shift, floor = rng.uniform(3, 15), rng.uniform(0.05, 0.4)
        steps = np.arange(1.0, 200.0)
        losses = shift * (1 - floor) / (steps + shift) + floor + rng.normal(0, noise, len(steps))
        found = true_drop_goal(steps, losses)
        if found is not None and found[0] >= 10:
            cases.append((steps, losses, *found))
    return cases


def ms_per_fit() -> float:
    estimator = ConvergenceEstimator()
    for step in range(1, 129):
        estimator.observe(step, 1.0 / (0.05 * step + 1) + 0.2)
    started = time.perf_counter()
    for _ in range(50):
        estimator.fit()
    return round((time.perf_counter() - started) / 50 * 1000, 2)


if __name__ == "__main__":
    require_data()
    cases = measured_cases()
    rng = np.random.default_rng(7)
    print_json(
        {
            "claimed_by_optimus": "error below 20 percent",
            "measured_curves": {name: table(found, 2.0) for name, found in cases.items()},
            "measured_curves_weighted_as_the_authors_code": {
                n: table(found, 4.0) for n, found in cases.items()
            },
            "generated_curves": {
                f"noise_{100 * noise:.0f}_percent": table(generated_cases(rng, noise), 2.0)
                for noise in (0.01, 0.03)
            },
            "generated_curves_drop_below_1_percent": {
                f"noise_{100 * noise:.1f}_percent": table(generated_drop_cases(rng, noise), 2.0)
                for noise in (0.005, 0.01)
            },
            "coverage_of_the_90_percent_interval": {
                **{f"measured: {name}": pooled_coverage(found) for name, found in cases.items()},
                "generated, a loss, noise 3 %": pooled_coverage(generated_cases(rng, 0.03)),
                "generated, drop below 1 %, noise 1 %": pooled_coverage(generated_drop_cases(rng, 0.01)),
            },
            "ms_per_fit_of_128_points": ms_per_fit(),
        }
    )
