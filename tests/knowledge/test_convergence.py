"""The convergence curve: its fit against a library, known curves, goals met step by step, and bad input."""

import csv
import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import nnls

from shoal.knowledge.convergence import CurveFit, fit_curve, nnls_two, recency_weights, replace_outliers
from shoal.knowledge.remaining import (
    ConvergenceEstimator,
    DropBelow,
    LossAtMost,
    remaining_steps,
)
from shoal.knowledge.unknown import Unknown


def curve(steps: np.ndarray, beta: tuple[float, float, float]) -> np.ndarray:
    return 1 / (beta[0] * steps + beta[1]) + beta[2]


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 10_000), st.integers(2, 12))
def test_two_unknowns_are_solved_as_the_library_does(seed, points):
    rng = np.random.default_rng(seed)
    design = rng.normal(0, 1, (points, 2)) + rng.uniform(-1, 2)
    target = rng.normal(0, 1, points) + rng.uniform(-1, 2)
    weights = rng.uniform(0.1, 4, points)
    a, b, squares = nnls_two(design[:, 0][None], design[:, 1][None], target, weights)
    root = np.sqrt(weights)
    expected, norm = nnls(design * root[:, None], target * root)
    assert (a[0], b[0]) == pytest.approx(tuple(expected), abs=1e-8)
    assert squares[0] == pytest.approx(norm**2, abs=1e-8)


@settings(max_examples=60, deadline=None)
@given(st.floats(0.01, 1.0), st.floats(0.2, 5.0), st.floats(0.0, 3.0))
def test_a_curve_without_noise_comes_back(b0, b1, b2):
    steps = np.linspace(1, 40 / b0, 60)
    losses = curve(steps, (b0, b1, b2))
    fit = fit_curve(steps, losses)
    assert isinstance(fit, CurveFit)
    assert fit.best.loss(steps) == pytest.approx(losses, rel=5e-3)
    assert fit.best.floor == pytest.approx(b2, abs=0.02 * losses[0])


def test_beta_is_written_as_the_paper_does():
    steps = np.arange(1.0, 101.0)
    fit = fit_curve(steps, curve(steps, (0.1, 0.5, 0.3)))
    assert fit.best.beta == pytest.approx((0.1, 0.5, 0.3), rel=0.02)


def test_an_outlier_is_replaced_by_its_neighbours_mean_and_the_rest_is_left():
    losses = np.array([5.0, 4.0, 3.5, 30.0, 3.0, 2.9, 2.8])
    cleaned = replace_outliers(losses)
    assert cleaned[3] == pytest.approx(np.mean([4.0, 3.5, 3.0, 2.9]))
    assert np.delete(cleaned, 3).tolist() == np.delete(losses, 3).tolist()


def test_the_plain_rule_replaces_whatever_leaves_its_neighbours_range():
    assert replace_outliers(np.array([5.0, 4.0, 4.1, 3.0, 2.0]), margin=0.0)[2] == 4.1, "inside 2..5"
    assert replace_outliers(np.array([5.0, 4.0, 5.1, 3.0, 2.0]), margin=0.0)[2] == pytest.approx(3.5)


def test_an_outlier_at_the_end_counts_too_but_an_ordinary_fall_does_not():
    steps = np.arange(1.0, 31.0)
    losses = curve(steps, (0.2, 0.5, 0.1))
    assert replace_outliers(losses).tolist() == losses.tolist()
    assert replace_outliers(np.append(losses, 3.0))[-1] < 0.4


def test_outliers_do_not_bend_the_prediction():
    steps = np.arange(1.0, 101.0)
    clean = curve(steps, (0.05, 0.5, 0.2))
    wild = clean.copy()
    wild[[20, 55, 90, 99]] *= 4
    goal = LossAtMost(0.25)
    truth = remaining_steps(fit_curve(steps, clean), 100.0, goal).steps
    assert remaining_steps(fit_curve(steps, wild), 100.0, goal).steps == pytest.approx(truth, rel=0.1)


def test_a_spike_does_not_set_the_scale_of_what_a_small_drop_is():
    steps = np.arange(10.0, 410.0, 10.0)
    clean = curve(steps, (0.01, 0.5, 0.2))
    wild = clean.copy()
    wild[10] = 1e6
    goal = DropBelow(0.01, epochs=3, steps_per_epoch=10)
    truth = remaining_steps(fit_curve(steps, clean), 400.0, goal)
    assert remaining_steps(fit_curve(steps, wild), 400.0, goal).steps == pytest.approx(truth.steps, rel=0.05)


def test_newer_points_weigh_more():
    weights = recency_weights(9, newer=2.0)
    assert (weights / weights[0]).tolist() == [1, 1, 1, 4, 4, 4, 16, 16, 16]
    steps = np.arange(1.0, 61.0)
    losses = np.where(steps <= 20, curve(steps, (0.02, 0.3, 0.9)), curve(steps, (0.05, 0.5, 0.2)))
    later = curve(np.array([80.0]), (0.05, 0.5, 0.2))[0]
    errors = [abs(fit_curve(steps, losses, newer=w).best.loss(80.0) - later) for w in (1.0, 4.0)]
    assert errors[1] < errors[0]


def test_steps_to_a_loss_are_where_the_fitted_curve_first_reaches_it():
    steps = np.arange(1.0, 51.0)
    fit = fit_curve(steps, curve(steps, (0.05, 0.5, 0.2)))
    answer = remaining_steps(fit, 50.0, LossAtMost(0.3))
    walked = next(k for k in range(51, 10_000) if fit.best.loss(float(k)) <= 0.3)
    assert walked - 50 == math.ceil(answer.steps)
    assert answer.low_steps <= answer.steps <= answer.high_steps


@pytest.mark.parametrize("fraction", [0.05, 0.01, 0.002])
def test_steps_to_convergence_are_where_epochs_of_small_drops_have_passed(fraction):
    """Without noise: seen are the first epochs before the row of small drops begins."""
    beta = (0.01, 0.5, 0.2)
    losses = curve(10.0 * np.arange(5000), beta)
    small = -np.diff(losses) < fraction * losses[1]  # the first epoch ends at step 10
    walked = next(e for e in range(1, 4990) if small[e : e + 3].all()) + 3
    steps = np.arange(10.0, min(10.0 * (walked - 2), 410.0), 10.0)
    fit = fit_curve(steps, curve(steps, beta))
    answer = remaining_steps(fit, steps[-1], DropBelow(fraction, epochs=3, steps_per_epoch=10))
    assert steps[-1] + answer.steps == pytest.approx(10 * walked, abs=10)


def noisy_drops(rng, noise):
    """A curve with noise, and where its measured drops are first small three times in a row."""
    shift, floor = rng.uniform(3, 15), rng.uniform(0.05, 0.4)
    steps = np.arange(1.0, 200.0)
    losses = (shift * (1 - floor) / (steps + shift) + floor) + rng.normal(0, noise, len(steps))
    small = -np.diff(losses) < 0.01 * losses.max()
    row = np.convolve(small, np.ones(3), mode="valid") == 3
    return steps, losses, steps[int(np.argmax(row)) + 3]


def test_noise_breaks_rows_of_small_drops_and_the_prediction_reckons_with_it():
    """Where the bare curve is flat enough is too early; the median of the chain less so, and it errs less."""
    rng = np.random.default_rng(5)
    goal, bare, chain, held = DropBelow(0.01, 3, 1.0), [], [], 0
    for _ in range(150):
        steps, losses, true_step = noisy_drops(rng, 0.01)
        seen = int(0.6 * true_step)
        fit = fit_curve(steps[:seen], losses[:seen])
        if seen < 6 or isinstance(fit, Unknown):
            continue
        a, c, limit = fit.best.amplitude, fit.best.shift, 0.01 * fit.largest_loss
        crossing = (np.sqrt(1 + 4 * a / limit) - 1) / 2 - c
        bare.append((max(crossing, seen - 2) + 3 - true_step) / true_step)
        answer = remaining_steps(fit, steps[seen - 1], goal)
        chain.append((seen + answer.steps - true_step) / true_step)
        held += answer.low_steps <= true_step - seen <= answer.high_steps
    assert np.median(bare) < -0.2
    assert np.median(bare) < 2 * np.median(chain) < 0.2
    assert np.median(np.abs(chain)) < 0.7 * np.median(np.abs(bare))
    assert held >= 0.85 * len(chain)


def test_who_has_two_small_drops_in_a_row_is_nearer_to_the_goal_than_who_has_none():
    steps = np.arange(1.0, 31.0)
    losses = curve(steps, (0.5, 1.0, 0.2)) + 0.01 * np.cos(np.arange(30.0) * 2.0)
    goal = DropBelow(0.01, 3, 1.0)
    near, far = losses.copy(), losses.copy()
    near[-3:] = near[-3]
    far[-1] = far[-2] - 0.02
    left = [remaining_steps(fit_curve(steps, drops), 30.0, goal).steps for drops in (near, far)]
    assert left[0] < left[1]


@pytest.mark.parametrize("epochs", [0, 1, 3])
def test_any_number_of_epochs_can_be_asked_for(epochs):
    steps = np.arange(1.0, 31.0)
    fit = fit_curve(steps, curve(steps, (0.05, 0.5, 0.2)))
    answer = remaining_steps(fit, 30.0, DropBelow(0.001, epochs, 1.0))
    assert answer.low_steps <= answer.steps <= answer.high_steps < math.inf


def test_a_row_that_noise_will_always_break_is_unknown_and_not_a_guess():
    steps = np.arange(1.0, 61.0)
    losses = curve(steps, (0.5, 1.0, 0.2)) + 0.05 * np.random.default_rng(0).normal(size=60)
    answer = remaining_steps(fit_curve(steps, np.abs(losses)), 60.0, DropBelow(0.001, 40, 1.0))
    assert isinstance(answer, Unknown)
    assert "noise breaks every row of 40 small drops" in answer.why


def test_a_goal_behind_the_job_leaves_nothing_to_do():
    steps = np.arange(1.0, 51.0)
    fit = fit_curve(steps, curve(steps, (0.05, 0.5, 0.2)))
    assert remaining_steps(fit, 50.0, LossAtMost(0.9)).steps == 0.0


def test_a_flat_curve_that_still_runs_has_at_least_an_epoch_to_go():
    steps = np.arange(10.0, 2010.0, 10.0)
    fit = fit_curve(steps, curve(steps, (0.05, 0.5, 0.2)))
    assert remaining_steps(fit, 2000.0, DropBelow(0.05, 3, 10)).steps == pytest.approx(10)


def test_the_interval_holds_about_as_often_as_it_says():
    """300 noisy curves at half of the way: the true step lies in the 90 % interval in most of them."""
    rng = np.random.default_rng(1)
    held = 0
    for _ in range(300):
        shift, floor = rng.uniform(5, 60), rng.uniform(0.05, 0.6)
        goal = floor + 0.1 * (1 - floor)
        true_step = shift * (1 - floor) / (goal - floor) - shift
        steps = np.linspace(1, true_step / 2, 80)
        losses = (shift * (1 - floor) / (steps + shift) + floor) * (1 + rng.normal(0, 0.01, 80))
        answer = remaining_steps(fit_curve(steps, losses), steps[-1], LossAtMost(goal))
        if not isinstance(answer, Unknown):
            held += answer.low_steps <= true_step / 2 <= answer.high_steps
    assert held >= 0.85 * 300


@pytest.mark.parametrize("noise", [0.0, 0.01])
def test_generated_curves_are_predicted_within_the_papers_20_percent_from_half_way(noise):
    rng = np.random.default_rng(2)
    errors = []
    for _ in range(60):
        shift, floor = rng.uniform(5, 60), rng.uniform(0.05, 0.6)
        goal = floor + 0.1 * (1 - floor)
        true_step = shift * (1 - floor) / (goal - floor) - shift
        steps = np.linspace(1, true_step / 2, 80)
        losses = (shift * (1 - floor) / (steps + shift) + floor) * (1 + rng.normal(0, noise, 80))
        answer = remaining_steps(fit_curve(steps, losses), steps[-1], LossAtMost(goal))
        errors.append(1.0 if isinstance(answer, Unknown) else abs(answer.steps - true_step / 2) / true_step)
    assert np.mean(np.array(errors) < 0.2) >= (1.0 if noise == 0 else 0.9)


@pytest.mark.reference
def test_measured_curves_are_predicted_better_the_further_the_job_is(shared_data):
    """Convergence as Optimus defines it, on all measured validation curves with ten points or more."""
    errors: dict[float, list[float]] = {0.5: [], 0.7: [], 0.9: []}
    held: list[bool] = []
    for path in sorted((shared_data / "pollux").glob("*/validation-*.csv")):
        rows = list(csv.DictReader(path.open()))
        steps = np.array([float(row["iteration"]) for row in rows])
        metric = np.array([float(row["metric"]) for row in rows])
        losses = 1 - metric if path.parent.name in ("cifar10", "imagenet", "ncf") else metric
        small = -np.diff(losses) / losses.max() < 0.01
        streaks = [i + 3 for i in range(len(small) - 2) if small[i : i + 3].all()]
        if len(rows) < 10 or not streaks:
            continue
        true_step = steps[streaks[0]]
        goal = DropBelow(0.01, 3, (steps[-1] - steps[0]) / (len(steps) - 1))
        for progress, found in errors.items():
            seen = steps <= progress * true_step
            fit = fit_curve(steps[seen], losses[seen])
            if isinstance(fit, CurveFit):
                at = progress * true_step
                answer = remaining_steps(fit, at, goal)
                found.append(abs(at + answer.steps - true_step) / true_step)
                held.append(answer.low_steps <= true_step - at <= answer.high_steps)
    medians = [np.median(errors[progress]) for progress in (0.5, 0.7, 0.9)]
    assert medians == sorted(medians, reverse=True)
    assert medians[0] < 0.2, "what Optimus claims, from half of the way on"
    assert medians[2] < 0.12
    assert len(errors[0.9]) >= 30
    assert np.mean(held) >= 0.9, "as often as the interval says"


FALLING = curve(np.arange(1.0, 21.0), (0.1, 0.5, 0.3))


@pytest.mark.parametrize(
    ("losses", "why"),
    [
        ([], "0 usable loss points and 5 are needed"),
        ([3.0, 2.0, 1.5], "3 usable loss points"),
        ([2.0] * 10, "all 10 losses are equal"),
        ([0.0] * 10, "all 10 losses are equal"),
        ([*FALLING, math.nan], "the loss became nan at step 21: the job diverges"),
        ([*FALLING, math.inf], "the loss became inf"),
        ([math.nan] * 6 + [1.0], "1 usable loss points"),
        (np.linspace(1, 5, 20), "diverges"),
        ([*FALLING, *np.linspace(0.5, 9, 30)], "diverges"),
        (-FALLING, "not negative"),
        (2 + 0.01 * np.cos(np.arange(40.0) * 2), "does not fall"),
    ],
)
def test_losses_that_determine_no_curve_are_unknown_and_say_why(losses, why):
    losses = np.asarray(losses, dtype=float)
    answer = fit_curve(np.arange(1.0, len(losses) + 1), losses)
    assert isinstance(answer, Unknown), answer
    assert why in answer.why


def test_a_loss_that_was_not_a_number_for_one_step_is_left_out():
    losses = FALLING.copy()
    losses[7] = math.nan
    assert isinstance(fit_curve(np.arange(1.0, 21.0), losses), CurveFit)


@pytest.mark.parametrize(
    "steps", [[1, 2, 2, 3, 4, 5], [5, 4, 3, 2, 1, 0], [-1, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, math.nan]]
)
def test_steps_out_of_order_are_unknown(steps):
    assert isinstance(fit_curve(np.array(steps, dtype=float), FALLING[:6]), Unknown)


@pytest.mark.parametrize(
    ("goal", "why"),
    [
        (LossAtMost(0.2), "levels off at 0.299, above the goal of 0.2"),
        (LossAtMost(math.nan), "is not a loss"),
        (DropBelow(0.0, 3, 10), "above 0"),
        (DropBelow(0.1, 3, 0), "above 0"),
    ],
)
def test_a_goal_that_cannot_be_reached_is_unknown_and_says_why(goal, why):
    fit = fit_curve(np.arange(1.0, 21.0), FALLING)
    answer = remaining_steps(fit, 20.0, goal)
    assert isinstance(answer, Unknown)
    assert why in answer.why


@settings(max_examples=150, deadline=None)
@given(st.lists(st.floats(allow_nan=True, allow_infinity=True, width=32), max_size=30), st.integers(0, 3))
def test_no_losses_whatever_raise(losses, kind):
    known = ConvergenceEstimator()
    for step, loss in enumerate(losses):
        known.observe(step, loss)
    goal = [LossAtMost(0.1), LossAtMost(1e9), DropBelow(0.01, 3, 5), DropBelow(0.5, 1, 1)][kind]
    answer = known.remaining(goal)
    if not isinstance(answer, Unknown):
        assert answer.steps >= 0
        assert answer.low_steps <= answer.steps <= answer.high_steps


def test_the_history_stays_bounded_and_keeps_its_shape():
    known = ConvergenceEstimator(capacity=64)
    for step in range(1, 5001):
        known.observe(step, curve(np.array(float(step)), (0.01, 0.5, 0.2)))
    assert len(known.to_dict()["steps"]) <= 64
    answer = known.remaining(LossAtMost(0.21))
    assert answer.steps == pytest.approx((100 - 0.5) / 0.01 - 5000, rel=0.1)


def test_going_back_to_a_checkpoint_forgets_what_came_after_it():
    known = ConvergenceEstimator()
    for step in range(1, 31):
        known.observe(step, FALLING[min(step, 20) - 1])
    known.observe(11, 0.77)
    assert known.to_dict()["steps"] == [*range(1, 11), 11]


def test_a_job_whose_last_loss_is_not_a_number_may_diverge_until_it_recovers():
    known = ConvergenceEstimator()
    for step, loss in enumerate(FALLING):
        known.observe(step, loss)
    assert isinstance(known.observe(20, math.nan), Unknown)
    assert "may diverge" in known.remaining(LossAtMost(0.4)).why
    known.observe(21, FALLING[-1])
    assert not isinstance(known.remaining(LossAtMost(0.4)), Unknown)


def test_the_state_survives_saving_as_json():
    known = ConvergenceEstimator(capacity=40, newer=4.0)
    for step, loss in enumerate(FALLING):
        known.observe(step, loss)
    again = ConvergenceEstimator.from_dict(json.loads(json.dumps(known.to_dict())))
    for goal in (LossAtMost(0.4), DropBelow(0.01, 3, 5)):
        assert again.remaining(goal) == known.remaining(goal)


@pytest.mark.parametrize(
    "goal", [DropBelow(0.01, 10**9, 1.0), DropBelow(math.inf, 3, 1.0), DropBelow(0.01, 3, math.inf)]
)
def test_a_goal_without_end_is_unknown_at_once(goal):
    fit = fit_curve(np.arange(1.0, 11.0), 1.0 / np.arange(1.0, 11.0) + 1.0)
    assert "400 epochs" in str(remaining_steps(fit, 10.0, goal))
