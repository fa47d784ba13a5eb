"""Stragglers: who is named, after how many steps, and how rarely a healthy worker is."""

import json

import numpy as np
import pytest

from shoal.knowledge.stragglers import StragglerDetector
from shoal.knowledge.unknown import Unknown


def steps_until_named(detector: StragglerDetector, slowdown: float, healthy_steps: int = 100) -> int | None:
    for _ in range(healthy_steps):
        detector.observe({str(worker): 1.0 for worker in range(4)})
    for step in range(1, 200):
        detector.observe({str(worker): slowdown if worker == 3 else 1.0 for worker in range(4)})
        if detector.stragglers():
            return step
    return None


@pytest.mark.parametrize(("slowdown", "steps"), [(1.0 / 0.75, 16), (2.0, 5)])
def test_a_worker_that_degrades_is_named_after_the_steps_the_authors_rule_needs(slowdown, steps):
    assert steps_until_named(StragglerDetector(confirm_steps=1), slowdown) == steps
    assert steps_until_named(StragglerDetector(), slowdown) == steps + 2, "two more to confirm"


def test_slower_than_the_limit_by_little_is_no_straggler():
    assert steps_until_named(StragglerDetector(), 1.24) is None


def test_the_reason_names_the_worker_and_its_speed():
    detector = StragglerDetector()
    for _ in range(30):
        detector.observe({"n0:0": 1.0, "n0:1": 1.0, "n1:0": 2.0})
    (straggler,) = detector.stragglers()
    assert straggler.worker == "n1:0"
    assert str(straggler.reason) == "Straggler: worker n1:0 computes at 0.50 of the median speed (limit 0.80)"
    assert straggler.reason.evidence["steps"] == 30


def test_the_slowest_comes_first_and_nobody_is_slow_when_all_are():
    detector, all_slow = StragglerDetector(), StragglerDetector()
    for step in range(30):
        detector.observe({"a": 1.0, "b": 3.0, "c": 2.0, "d": 1.0, "e": 1.0})
        all_slow.observe(dict.fromkeys("abcd", 1.0 if step < 10 else 5.0))
    assert [straggler.worker for straggler in detector.stragglers()] == ["b", "c"]
    assert all_slow.stragglers() == ()


def test_one_step_that_hangs_accuses_nobody():
    detector = StragglerDetector()
    named = set()
    for step in range(200):
        times = {str(worker): 1.0 for worker in range(8)}
        times["2"] = 50.0 if step in (0, 60) else 1.0
        detector.observe(times)
        named |= {straggler.worker for straggler in detector.stragglers()}
    assert named == set()


@pytest.mark.parametrize(("noise", "most"), [(0.1, 0.0), (0.2, 0.01)])
def test_healthy_workers_are_rarely_accused_under_noise(noise, most):
    """Twenty jobs of eight workers, 500 steps each: lognormal noise, one step in 200 four times as long."""
    accused = 0
    for seed in range(20):
        rng = np.random.default_rng(seed)
        detector = StragglerDetector()
        named: set[str] = set()
        times = np.exp(rng.normal(0, noise, (500, 8))) * np.where(rng.random((500, 8)) < 0.005, 4, 1)
        for row in times:
            detector.observe({str(worker): float(t) for worker, t in enumerate(row)})
            named |= {straggler.worker for straggler in detector.stragglers()}
        accused += len(named)
    assert accused / 160 <= most


def test_a_bad_first_step_does_not_linger_as_in_the_authors_start():
    ours, authors = StragglerDetector(), StragglerDetector(from_first=True, confirm_steps=1)
    for step in range(12):
        times = {"a": 8.0 if step == 0 else 1.0, "b": 1.0, "c": 1.0}
        ours.observe(times)
        authors.observe(times)
        if step == 9:
            assert ours.stragglers() == ()
            assert [straggler.worker for straggler in authors.stragglers()] == ["a"]


def test_after_a_change_of_workers_the_gone_are_forgotten_and_judging_waits():
    detector = StragglerDetector()
    for _ in range(30):
        detector.observe({"a": 1.0, "b": 1.0, "slow": 3.0})
    assert detector.stragglers()
    detector.workers_changed(["a", "b", "new"])
    assert detector.stragglers() == ()
    for _ in range(20):
        detector.observe({"a": 1.0, "b": 1.0, "new": 1.0})
    assert detector.stragglers() == ()


@pytest.mark.parametrize("times", [{}, {"a": 1.0}, {"a": 1.0, "b": float("nan")}, {"a": 0.0, "b": -1.0}])
def test_too_few_usable_times_are_unknown_and_teach_nothing(times):
    detector = StragglerDetector()
    for _ in range(50):
        assert isinstance(detector.observe(times), Unknown)
    assert detector.stragglers() == ()


def test_a_worker_without_a_usable_time_is_left_out_by_name():
    answer = StragglerDetector().observe({"a": 1.0, "b": 1.0, "c": float("inf")})
    assert "no usable compute time from c" in answer.why


def test_the_state_survives_saving_as_json():
    detector, again = StragglerDetector(), StragglerDetector()
    for _ in range(30):
        detector.observe({"a": 1.0, "b": 1.0, "c": 2.0})
    again.load(json.loads(json.dumps(detector.to_dict())))
    assert again.stragglers() == detector.stragglers() != ()
