"""Stragglers by compute time alone (Or, Zhang, Freedman; MLSys'20): who is named, how soon, and how rarely in vain."""

from __future__ import annotations

import numpy as np
import pytest

from shoal.wire.messages import Report
from shoal.wire.straggler import StragglerRule

WORKERS = ("a", "b", "c", "d")


def authors(**more) -> StragglerRule:
    return StragglerRule(from_first=True, confirm_reports=1, **more)


def feed(
    rule: StragglerRule, slowdown: dict[str, float], steps: int, samples: dict[str, float] | None = None
):
    """One report per worker and step; the first straggler named, and after how many steps."""
    for step in range(1, steps + 1):
        for w in WORKERS:
            n = (samples or {}).get(w, 8.0)
            found = rule.observe(w, Report(steps=1, samples=n, compute_s=0.1 * slowdown.get(w, 1.0)), WORKERS)
            if found:
                return found, step
    return None, steps


def accused(rule: StragglerRule, compute_s: np.ndarray, steps_per_report: int = 1) -> set[str]:
    """Who is named by these compute times ([report, worker], each of so many steps)."""
    members = tuple(str(w) for w in range(compute_s.shape[1]))
    named = set()
    for row in compute_s:
        for worker, seconds in zip(members, row.tolist()):
            report = Report(steps=steps_per_report, samples=8.0 * steps_per_report, compute_s=seconds)
            found = rule.observe(worker, report, members)
            named |= {found[0]} if found else set()
    return named


@pytest.mark.parametrize(("slowdown", "steps"), [(1.333, 16), (2.0, 5)])
def test_a_healthy_worker_that_degrades_is_found_after_the_steps_that_the_smoothing_needs(slowdown, steps):
    """As many as the reference says for the authors' rule; two more to confirm it."""
    for rule, more in ((authors(), 0), (StragglerRule(), 2)):
        assert feed(rule, {}, 50)[0] is None
        found, after = feed(rule, {"c": slowdown}, 60)
        assert found is not None
        assert found[0] == "c"
        assert after == steps + more


def test_a_slowdown_below_the_limit_of_one_and_a_quarter_is_never_found():
    assert feed(StragglerRule(), {"b": 1.24}, 500)[0] is None


def test_a_straggler_is_named_once_and_nobody_is_slow_when_all_are():
    rule = StragglerRule()
    assert feed(rule, {"b": 3.0}, 50)[0] is not None
    assert feed(rule, {"b": 3.0}, 50)[0] is None
    everyone = StragglerRule()
    assert feed(everyone, {}, 20)[0] is None
    assert feed(everyone, dict.fromkeys(WORKERS, 5.0), 50)[0] is None


def test_a_share_that_is_one_sample_smaller_is_no_fault():
    assert feed(StragglerRule(), {}, 100, {"a": 2.0, "b": 1.0, "c": 1.0, "d": 1.0})[0] is None
    assert feed(StragglerRule(), {"a": 2.0}, 100, {"a": 2.0, "b": 1.0, "c": 1.0, "d": 1.0})[0] is None


@pytest.mark.parametrize("steps_per_report", [1, 5])
def test_one_report_that_hangs_accuses_nobody(steps_per_report):
    times = np.full((200, 8), 0.1 * steps_per_report)
    times[[0, 60], 2] *= 4.0
    assert accused(StragglerRule(), times, steps_per_report) == set()
    if steps_per_report == 5:
        assert accused(authors(), times, steps_per_report) == {"2"}, "as the authors' rule does"


def test_a_bad_first_step_does_not_linger_as_in_the_authors_start():
    times = np.full((12, 3), 0.1)
    times[0, 2] = 0.8
    assert accused(StragglerRule(), times) == set()
    assert accused(authors(), times) == {"2"}


@pytest.mark.parametrize(("noise", "most"), [(0.1, 0.0), (0.2, 0.01)])
def test_healthy_workers_are_rarely_accused_under_noise(noise, most):
    """Twenty jobs of eight workers, 500 steps each: lognormal noise, one step in 200 four times as long."""
    count = 0
    for seed in range(20):
        rng = np.random.default_rng(seed)
        times = np.exp(rng.normal(0, noise, (500, 8))) * np.where(rng.random((500, 8)) < 0.005, 4, 1)
        count += len(accused(StragglerRule(), times))
    assert count / 160 <= most


def test_after_a_change_of_workers_the_gone_are_forgotten_and_judging_waits():
    rule = StragglerRule()
    assert feed(rule, {"b": 3.0}, 11)[0] is not None
    rule.forget("b")
    rule.reset()
    assert feed(rule, {"c": 3.0}, 9)[0] is None, "ten steps of the new generation come first"
    found, _ = feed(rule, {"c": 3.0}, 2)
    assert found is not None
    assert found[0] == "c"


@pytest.mark.parametrize(
    "report",
    [
        Report(steps=0, samples=8.0, compute_s=0.1),
        Report(steps=1, samples=0.0, compute_s=0.1),
        Report(steps=1, samples=8.0, compute_s=0.0),
    ],
)
def test_reports_that_tell_no_speed_teach_nothing(report):
    rule = StragglerRule()
    assert all(rule.observe(w, report, WORKERS) is None for w in WORKERS for _ in range(50))
    assert feed(rule, {}, 30)[0] is None
