"""Stragglers by compute time alone (Or, Zhang, Freedman; MLSys'20)."""

from __future__ import annotations

import pytest

from shoal.wire.messages import Report
from shoal.wire.straggler import StragglerRule

WORKERS = ("a", "b", "c", "d")


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


@pytest.mark.parametrize(("slowdown", "steps"), [(1.333, 16), (2.0, 5)])
def test_a_healthy_worker_that_degrades_is_found_after_the_steps_that_the_smoothing_needs(slowdown, steps):
    rule = StragglerRule(min_steps=1)
    assert feed(rule, {}, 50)[0] is None
    found, after = feed(rule, {"c": slowdown}, 60)
    assert found is not None
    assert found[0] == "c"
    assert after == steps


def test_a_slowdown_below_the_limit_of_one_and_a_quarter_is_never_found():
    assert feed(StragglerRule(), {"b": 1.24}, 500)[0] is None


def test_a_straggler_is_named_once():
    rule = StragglerRule()
    assert feed(rule, {"b": 3.0}, 50)[0] is not None
    assert feed(rule, {"b": 3.0}, 50)[0] is None


def test_a_share_that_is_one_sample_smaller_is_no_fault():
    assert feed(StragglerRule(), {}, 100, {"a": 2.0, "b": 1.0, "c": 1.0, "d": 1.0})[0] is None
    assert feed(StragglerRule(), {"a": 2.0}, 100, {"a": 2.0, "b": 1.0, "c": 1.0, "d": 1.0})[0] is None
