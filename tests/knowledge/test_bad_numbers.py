"""Numbers that cannot be get an answer that says why: never an exception, a warning or a guess."""

from __future__ import annotations

import math

import numpy as np
import pytest

from shoal.core.errors import ShoalError
from shoal.knowledge.auto_gpus import FinishedRun, choose_gpus
from shoal.knowledge.climb import ladder
from shoal.knowledge.convergence import CurveFit, fit_curve
from shoal.knowledge.features import task_features
from shoal.knowledge.heuristics import Progress, ScalingEfficiency, UtilityAgainstCost
from shoal.knowledge.marginal_utility import RightShare, right_share
from shoal.knowledge.next_sample import next_sample
from shoal.knowledge.online_speed import OnlineSpeed
from shoal.knowledge.phases import Phases, phases_of
from shoal.knowledge.remaining import DropBelow, LossAtMost, remaining_steps
from shoal.knowledge.resources import Example, ResourceEstimator
from shoal.knowledge.size_search import Autoscale, SizeSearch
from shoal.knowledge.speed_estimator import SpeedEstimator
from shoal.knowledge.speed_fit import SpeedFit, fit_speed
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


NOT_FINITE = [math.nan, math.inf, -math.inf]
NOT_COUNTS = [*NOT_FINITE, 1.5, -1, 0, 10**30]


@pytest.fixture(scope="module")
def times():
    """Running times by GPUs and a flag, learned from twenty jobs."""
    known = ResourceEstimator()
    for i in range(20):
        known.observe("job", Example({"num_gpus": 1 + i % 4, "batch": i}, {"total_s": 100.0 / (1 + i % 4)}))
    assert known.train("job") is None
    return known


@pytest.mark.parametrize("number", [*NOT_FINITE, 1e300, 10**30])
def test_features_that_no_job_has(times, number):
    for asked in ({"num_gpus": number, "batch": 1}, {"num_gpus": 1, "batch": number}):
        for answer in (times.predict("job", asked), times.needs("job", asked)):
            assert isinstance(answer, Unknown)
            assert "is not a valid number" in answer.why
    assert isinstance(
        times.observe("job", Example({"num_gpus": number, "batch": 1}, {"total_s": 1.0})), Unknown
    )
    assert isinstance(times.observe("job", Example({"num_gpus": 1, "batch": 1}, {"total_s": -1.0})), Unknown)


@pytest.mark.parametrize("number", NOT_COUNTS)
def test_numbers_of_gpus_that_cannot_be(times, number):
    features = {"num_gpus": 1, "batch": 1}
    assert isinstance(times.speed_by_gpus("job", features, number), Unknown)
    assert isinstance(right_share(np.array([0.0, 1.0, 1.9]), max_gpus=number), Unknown)
    assert isinstance(right_share(np.array([0.0, 1.0, 1.9]), min_gpus=number), Unknown)
    with pytest.raises(ShoalError, match="must be a whole number from 1 up"):
        choose_gpus(["x"], number, measured=Unknown("nothing was"), finished=[])
    with pytest.raises(ValueError, match="whole numbers from 1"):
        SpeedEstimator(number, 4)
    known = SpeedEstimator(8, 4)
    known.observe(2, 1, "v100", 0.5)
    assert number == 1.5 or isinstance(known.seconds(number, 1, "v100"), Unknown)
    assert isinstance(known.next_gpus("v100", [number]), Unknown)
    assert not known.spread("v100", number).any()
    if not isinstance(number, int):
        with pytest.raises(ShoalError, match="whole numbers of GPUs"):
            ladder(1, number, 1)


@pytest.mark.parametrize("number", [*NOT_FINITE, 0.0, -1.0])
def test_finished_jobs_that_cannot_be_teach_nothing(number):
    real = [FinishedRun(["x"], 1 + i % 2, 10.0) for i in range(6)]
    odd = [FinishedRun(["x"], 4, number) for _ in range(10)]
    answer = choose_gpus(["x"], 8, measured=Unknown("nothing was"), finished=[*real, *odd])
    assert not answer.known
    assert "only 6 jobs" in answer.why
    answer = choose_gpus(["x"], 8, measured=Unknown("nothing was"), finished=odd)
    assert "there are none" in answer.why


def test_tables_that_tell_nothing_of_more_gpus():
    for speed in (
        [],
        [0.0],
        [0.0, np.nan, 2.0],
        [0.0, 0.0, 1.0],
        [0.0, -1.0],
        [0.0, 1e-300, 1e300],
        np.ones((2, 2)),
    ):
        assert isinstance(right_share(np.array(speed)), Unknown)
    known = right_share(np.array([0.0, 1.0, np.nan, 2.9]))
    assert isinstance(known, RightShare)
    assert known.gpus == 3


@pytest.mark.parametrize("least", NOT_FINITE)
def test_a_least_gain_that_is_no_number(least):
    assert isinstance(right_share(np.array([0.0, 1.0, 2.0]), least=least), Unknown)


def searched(search, progress=None):
    """The search after a dozen steps at one GPU and at two."""
    for gpus in [1] * 12 + [2] * 12:
        search.observe(gpus, 0.1, 10.0)
        search.decide(progress)
    return search


@pytest.mark.parametrize("number", [*NOT_FINITE, 0, -1, 1.5, 10**30])
def test_steps_that_cannot_be_change_nothing_in_a_search(number):
    asked = Autoscale(ScalingEfficiency(0.5))
    search, same = searched(SizeSearch(asked, 1, 4)), searched(SizeSearch(asked, 1, 4))
    for gpus, step_s, samples in ((number, 0.1, 10.0), (2, number, 10.0), (2, 0.1, number)):
        if isinstance(search.observe(gpus, step_s, samples), Unknown):
            assert search.to_dict() == same.to_dict()
        else:
            assert number in (1.5, 10**30), "a batch or a time may be"
            search = searched(SizeSearch(asked, 1, 4))


@pytest.mark.parametrize("number", [*NOT_FINITE, -1.0])
def test_a_heuristic_without_numbers_is_refused_and_one_without_the_work_left_holds_no_one(number):
    if not math.isfinite(number):
        with pytest.raises(ValueError, match="must be a number"):
            ScalingEfficiency(number)
        with pytest.raises(ValueError, match="needs numbers"):
            UtilityAgainstCost((number, 0.0), (0.0, 3600.0))
    with pytest.raises(ValueError, match="a price must be a number"):
        UtilityAgainstCost((10.0, 0.0), (0.0, 3600.0), number)
    for progress in (Progress(0.0, number), Progress(number, 1e6)):
        search = searched(
            SizeSearch(Autoscale(UtilityAgainstCost((10.0, 0.0), (0.0, 3600.0))), 1, 4), progress
        )
        assert search.cap.gpus is None
        assert "unknown, because utility against cost needs to know the remaining work" in search.cap.why


@pytest.mark.parametrize(
    "saved", [{}, {"engine": 1}, {"engine": {}, "hold": []}, {"engine": {"min_gpus": 1}}]
)
def test_a_saved_search_that_is_none_is_said_to_be_none(saved):
    with pytest.raises(ShoalError, match="the saved search cannot be read"):
        SizeSearch.from_dict(saved, Autoscale(ScalingEfficiency()))


@pytest.mark.parametrize("number", [*NOT_FINITE, -1.0, 1e300])
def test_samples_out_of_time_tell_no_phases(number):
    assert isinstance(phases_of(np.array([1.0, 9.0]), np.array([50.0, 50.0]), 0.0, 10.0), Phases)
    assert isinstance(phases_of(np.array([number, 9.0]), np.array([50.0, 50.0]), 0.0, 10.0), Unknown)
    assert number == 1e300 or isinstance(
        phases_of(np.array([1.0, 9.0]), np.array([50.0, 50.0]), 0.0, number), Unknown
    )
    if not math.isfinite(number):
        assert isinstance(phases_of(np.array([1.0, 9.0]), np.array([number, 50.0]), 0.0, 10.0), Unknown)


@pytest.mark.parametrize("number", [*NOT_FINITE, -1.0, 1e300, 10**30])
def test_goals_and_steps_beyond_all_bounds(number):
    fit = fit_curve(STEPS, 1 / STEPS)
    assert isinstance(fit, CurveFit)
    assert number == 10**30 or isinstance(remaining_steps(fit, number, LossAtMost(0.05)), Unknown)
    assert number == 10**30 or isinstance(remaining_steps(fit, 10, DropBelow(number, 3, 5.0)), Unknown)
    assert isinstance(remaining_steps(fit, 10, DropBelow(0.01, number, 5.0)), Unknown)
    assert number == 10**30 or isinstance(remaining_steps(fit, 10, DropBelow(0.01, 3, number)), Unknown)


@pytest.mark.parametrize(
    "command", [[], [""], ["--"], ["--="], ["--a="], ["--a=1e999"], ["--a=" + "9" * 4000], ["--x=\ud800"]]
)
def test_any_command_has_features_or_is_unknown(times, command):
    answer = times.predict("job", task_features(command, num_gpus=1))
    assert isinstance(answer, Unknown)
