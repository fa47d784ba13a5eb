"""The documented prior, and how measurements change it."""

import json

import numpy as np
import pytest

from shoal.knowledge.online_speed import DRIFT_AFTER, Source
from shoal.knowledge.speed_estimator import SpeedEstimator
from shoal.knowledge.speed_prior import assumed_speed

GPUS = 8


def measured(points: dict[int, float], per_node: int = 8, times: int = 1) -> SpeedEstimator:
    known = SpeedEstimator(GPUS, per_node)
    for gpus, seconds in points.items():
        for _ in range(times):
            assert known.observe(gpus, -(-gpus // per_node), "v100", seconds) is None
    return known


@pytest.mark.parametrize("at", range(1, GPUS + 1))
@pytest.mark.parametrize("per_node", [1, 2, 8])
@pytest.mark.parametrize("seconds", [1e-4, 0.3, 500.0])
def test_a_curve_from_one_measured_size_is_the_prior_scaled_to_it(at: int, per_node: int, seconds: float):
    table = measured({at: seconds}, per_node).table("v100")
    prior = assumed_speed(GPUS)
    assert table.iterations_per_s[1:] * seconds == pytest.approx(prior[1:] / prior[at], rel=0.01)


def test_measured_at_two_gpus_the_third_is_expected_to_add_37_per_cent_and_the_fourth_23():
    speed = measured({2: 0.1}).table("v100").iterations_per_s
    assert speed[3] / speed[2] - 1 == pytest.approx(0.375, abs=0.01)
    assert speed[4] / speed[3] - 1 == pytest.approx(0.23, abs=0.01)


@pytest.mark.parametrize(
    "true", [lambda n: 1.0, lambda n: 1 / n, lambda n: 0.5 + 0.5 / n, lambda n: 1 + 0.1 * n]
)
def test_each_further_size_brings_the_curve_nearer_to_the_true_one(true):
    sizes = np.arange(1, GPUS + 1)
    errors = []
    for count in (1, 2, 3, 5):
        chosen = [2, 4, 1, 8, 6][:count]
        table = measured({n: true(n) for n in chosen}).table("v100")
        wanted = np.array([1 / true(n) for n in sizes])
        errors.append(np.abs(table.iterations_per_s[1:] / wanted - 1).max())
    assert errors[1] < errors[0]
    assert errors[-1] < 0.05


def test_the_interval_contains_jobs_that_do_not_scale_and_jobs_that_scale_perfectly():
    low, high = measured({2: 0.1}).table("v100").interval()
    assert low[4] < 10.0  # as fast as with 2
    assert high[4] > 20.0  # twice as fast
    assert high[2] / low[2] < 1.25  # what was measured is known well
    nearer = measured({2: 0.1, 4: 0.06, 8: 0.04}).table("v100").interval()
    assert nearer[1][3] / nearer[0][3] < high[3] / low[3]


def test_a_speed_that_changes_by_ten_times_is_believed_after_three_measurements_and_the_rest_is_stale():
    known = measured({1: 1.0, 2: 0.6, 4: 0.4}, times=5)
    for _ in range(DRIFT_AFTER - 1):
        known.observe(2, 1, "v100", 6.0)
    assert known.table("v100").iterations_per_s[2] == pytest.approx(1 / 0.6)  # may be an outlier yet
    known.observe(2, 1, "v100", 6.0)
    table = known.table("v100")
    assert table.iterations_per_s[2] == pytest.approx(1 / 6.0)
    assert table.source[[1, 2, 4]].tolist() == [Source.ASSUMED, Source.MEASURED, Source.ASSUMED]
    assert table.iterations_per_s[4] == pytest.approx(1 / 4.0)  # as if all sizes had changed alike
    again = SpeedEstimator.from_dict(json.loads(json.dumps(known.to_dict())))
    assert again.table("v100").source.tolist() == table.source.tolist()
    known.observe(4, 1, "v100", 5.0)
    assert known.table("v100").iterations_per_s[4] == pytest.approx(1 / 5.0)


def test_single_outliers_and_two_jobs_of_different_speed_do_not_count_as_a_change():
    known = measured({1: 1.0, 2: 0.6}, times=5)
    for seconds in (6.0, 0.6, 6.0, 0.3, 6.0, 0.3, 0.6):
        known.observe(2, 1, "v100", seconds)
    table = known.table("v100")
    assert table.iterations_per_s[2] == pytest.approx(1 / 0.6)
    assert table.source[1] == Source.MEASURED


def test_a_state_of_an_earlier_version_is_read():
    state = measured({1: 1.0, 2: 0.6}).to_dict()
    for known in state["types"].values():
        known["measured"] = [row[:6] for row in known["measured"]]
    table = SpeedEstimator.from_dict(state).table("v100")
    assert table.source[[1, 2]].tolist() == [Source.MEASURED] * 2
