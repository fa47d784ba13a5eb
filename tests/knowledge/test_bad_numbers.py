"""Numbers that cannot be get an answer that says why: never an exception, a warning or a guess."""

from __future__ import annotations

import math

import numpy as np
import pytest

from shoal.knowledge.convergence import CurveFit, fit_curve
from shoal.knowledge.next_sample import next_sample
from shoal.knowledge.online_speed import OnlineSpeed
from shoal.knowledge.remaining import LossAtMost, remaining_steps
from shoal.knowledge.speed import SpeedFit, fit_speed
from shoal.knowledge.speed_models import MODELS
from shoal.knowledge.unknown import Unknown

pytestmark = pytest.mark.filterwarnings("error")
STEPS = np.arange(1.0, 11.0)


@pytest.mark.parametrize(
    ("steps", "losses"),
    [
        (STEPS, np.full(10, np.nan)),
        (STEPS, [5, 4, 3, 2, 1, 1, 1, 1, 1, np.inf]),
        (STEPS, 1e300 * STEPS[::-1]),
        (STEPS, 1.7e308 / STEPS),
        (1e300 * STEPS, 1 / STEPS),
        (STEPS, np.ones(10)),
        (STEPS, 2.0**STEPS),
        (STEPS.reshape(5, 2), (1 / STEPS).reshape(5, 2)),
    ],
)
def test_losses_that_show_nothing(steps, losses):
    answer = fit_curve(steps, losses)
    assert isinstance(answer, Unknown)
    assert answer.why


def test_a_goal_beyond_all_losses_is_reached_already():
    fit = fit_curve(STEPS, 1 / STEPS)
    assert isinstance(fit, CurveFit)
    left = remaining_steps(fit, 10, LossAtMost(1e308))
    assert not isinstance(left, Unknown)
    assert left.steps == 0


@pytest.mark.parametrize("model", MODELS.values(), ids=lambda m: m.name)
@pytest.mark.parametrize("seconds", [math.nan, math.inf, -1.0, 0.0, 1e300, 1e-300])
def test_steps_that_no_step_takes(model, seconds):
    configs = np.array([[1.0 + i] * len(model.columns) for i in range(8)])
    assert isinstance(fit_speed(model, configs, np.full(8, seconds)), Unknown)
    online = OnlineSpeed(model)
    assert isinstance(online.observe(tuple(configs[0]), seconds), Unknown)
    assert len(online.configs()) == 0


@pytest.mark.parametrize("model", MODELS.values(), ids=lambda m: m.name)
@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0, 0.0, 1e300])
def test_configurations_that_cannot_be(model, value):
    width = len(model.columns)
    configs = np.array([[1.0 + i] * width for i in range(8)])
    assert isinstance(fit_speed(model, configs * 0 + value, np.ones(8)), Unknown)
    online = OnlineSpeed(model)
    assert isinstance(online.observe((value,) * width, 1.0), Unknown)
    assert isinstance(online.observe((1.0,) * (width + 1), 1.0), Unknown)
    fit = fit_speed(model, configs, np.ones(8), min_points=1)
    assert isinstance(fit, SpeedFit)
    assert isinstance(next_sample(fit, configs * 0 + value, configs), Unknown)
    assert isinstance(next_sample(fit, configs, configs, np.ones(3)), Unknown)
