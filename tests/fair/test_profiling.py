"""Transparent profiling: what is measured, with which spread, and what still has to be."""

import json
from math import inf, isnan

import pytest

from shoal.core.errors import ShoalError
from shoal.policies.gandiva_fair.profiling import Measured, Profiles, Rules, Visit

K80, P40, P100 = 0, 1, 2
GRU = {K80: 1.0, P40: 3.0, P100: 2.58}


def measured(key="u", speeds=GRU, samples=3, at_s=0.0):
    profiles = Profiles()
    for gpu_type, speed in speeds.items():
        for k in range(samples):
            profiles.observe(key, gpu_type, speed * (1 + 0.02 * (k - 1)), at_s)
    return profiles


def test_mean_and_spread_are_those_of_the_samples():
    m = Measured().add(2.0, 1.0).add(3.0, 2.0).add(4.0, 3.0)
    assert (m.samples, m.mean, m.last_s) == (3, 3.0, 3.0)
    assert m.spread == pytest.approx(1 / 3)
    assert m.uncertainty == pytest.approx(1 / 3 / 3**0.5)


def test_the_speed_up_of_a_newer_type_may_be_the_smaller_one():
    profiles = measured()
    assert profiles.speed_up("u", P40, K80) == pytest.approx(3.0)
    assert profiles.speed_up("u", P100, P40) == pytest.approx(0.86)


def test_a_type_never_measured_has_no_speed_rather_than_a_guess():
    assert isnan(measured(speeds={K80: 1.0}).speed_up("u", P40, K80))


def test_a_job_visits_each_type_it_may_use_and_no_other():
    profiles = measured(speeds={K80: 1.0})
    assert profiles.visits([(7, "u", (K80, P40))], {}, 0.0, 4) == [Visit(7, P40, "missing")]
    assert profiles.visits([(7, "u", (K80,))], {}, 0.0, 4) == []


def test_one_job_of_a_user_visits_for_all_of_them():
    profiles = Profiles()
    jobs = [(1, "u", (K80, P40)), (2, "u", (K80, P40)), (3, "v", (K80, P40))]
    assert {v.job for v in profiles.visits(jobs, {}, 0.0, 9)} == {1, 3}
    assert {v.job for v in profiles.visits(jobs, {1: K80}, 0.0, 9)} == {3}


def test_visits_at_a_time_are_bounded():
    jobs = [(i, f"u{i}", (K80, P40)) for i in range(9)]
    assert len(Profiles().visits(jobs, {100: K80}, 0.0, 3)) == 2


def test_stale_and_noisy_types_are_measured_again_but_not_for_ever():
    rules = Rules(least_samples=2, tolerance=0.1, most_samples=6, stale_s=1000.0)
    profiles = Profiles(rules)
    for speed in (1.0, 1.01):
        profiles.observe("u", K80, speed, 0.0)
    for speed in (1.0, 3.0):
        profiles.observe("u", P40, speed, 0.0)
    assert profiles.lacking("u", (K80, P40), 500.0) == [(P40, "noisy")]
    assert profiles.lacking("u", (K80,), 1500.0) == [(K80, "stale")]
    for speed in (1.0, 3.0, 1.0, 3.0):
        profiles.observe("u", P40, speed, 600.0)
    assert profiles.lacking("u", (P40,), 700.0) == []


def test_a_stale_profile_starts_anew_with_its_first_fresh_sample():
    profiles = Profiles(Rules(stale_s=10.0))
    profiles.observe("u", K80, 5.0, 0.0)
    profiles.observe("u", K80, 2.0, 100.0)
    assert profiles.speed("u", K80) == 2.0


def test_profiles_survive_json():
    profiles, again = measured(), Profiles()
    again.restore(json.loads(json.dumps(profiles.state())))
    assert again.known == profiles.known


@pytest.mark.parametrize("speed", [0.0, -1.0, inf, float("nan")])
def test_a_speed_that_cannot_be_is_refused(speed):
    with pytest.raises(ShoalError, match="positive and finite"):
        Measured().add(speed, 0.0)
