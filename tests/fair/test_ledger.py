"""The fairness ledger: settled lazily, by user and type, whatever the order of changes."""

import json

import numpy as np
import pytest

from shoal.core.job import GpuRange, Job
from shoal.core.ledger import BORROWED, ENTITLED, LENT, RECEIVED, TRADED, Ledger, entitlement
from shoal.core.profile import Profile
from shoal.core.view import View

PROFILE = Profile.of("m", {1: 1.0, 8: 0.2})


def view_of(jobs, gpu_types=("gpu",), total=8):
    """jobs: (user, requested, gpus, type)."""
    view = View(gpu_types, total)
    for i, (user, wish, gpus, gpu_type) in enumerate(jobs):
        row = view.add(i, Job(f"j{i}", 0.0, GpuRange(1, 8), wish), PROFILE, user, 0.0)
        view.gpus[row], view.gpu_type[row] = gpus, gpu_type if gpus else -1
    return view


def observe(ledger, view, now_s, tickets=(1.0, 1.0), gpus=(8,), **more):
    ledger.observe(view, np.array(tickets), np.array(gpus, np.int32), now_s, **more)


def test_the_worked_example_of_limited_demand():
    view = view_of([(0, 4, 4, 0), (1, 4, 2, 0), (2, 2, 2, 0)])
    ledger = Ledger(("a", "b", "c"), ("gpu",))
    observe(ledger, view, 0.0, (1.0, 1.0, 1.0))
    ledger.settle(10.0)
    assert ledger.account[:, 0, ENTITLED].tolist() == [30, 30, 20]
    assert ledger.account[:, 0, RECEIVED].tolist() == [40, 20, 20]
    assert ledger.account[:, 0, BORROWED].tolist() == [10, 0, 0]
    assert ledger.account[:, 0, LENT].tolist() == [0, 10, 0]
    assert ledger.deviation().tolist() == pytest.approx([1 / 3, -1 / 3, 0])


def test_an_idle_user_is_due_nothing_and_lends_nothing():
    ledger = Ledger(("a", "b"), ("gpu",))
    observe(ledger, view_of([(0, 8, 8, 0)]), 0.0)
    ledger.settle(5.0)
    assert ledger.account[1].sum() == 0
    assert ledger.account[0, 0, [ENTITLED, RECEIVED, BORROWED]].tolist() == [40, 40, 0]
    assert np.isnan(ledger.deviation()[1])


def test_what_nobody_takes_is_idle_not_lent():
    ledger = Ledger(("a", "b"), ("gpu",))
    observe(ledger, view_of([(0, 8, 0, 0), (1, 8, 4, 0)]), 0.0)
    ledger.settle(1.0)
    assert ledger.account[0, 0, LENT] == 0


def test_traded_gpus_are_neither_lent_nor_borrowed():
    view = view_of([(0, 8, 6, 0), (1, 8, 2, 1)], ("k80", "v100"))
    ledger = Ledger(("a", "b"), ("k80", "v100"))
    traded = np.array([[2.0, -1.0], [-2.0, 1.0]])
    observe(ledger, view, 0.0, gpus=(8, 2), traded=traded, entitled=np.array([[4.0, 1.0], [4.0, 1.0]]))
    ledger.settle(10.0)
    assert ledger.account[:, :, TRADED].tolist() == [[20, -10], [-20, 10]]
    assert ledger.account[:, :, BORROWED].sum() == 0
    assert ledger.account[1, 0, LENT] == 0  # two K80 are left unused, and nobody runs on them


def test_users_are_due_the_fast_types_first_and_only_types_they_may_use():
    due = entitlement(
        np.ones(2),
        np.array([4.0, 20.0]),
        np.array([[4.0, 4.0], [20.0, 0.0]]),
        np.array([16.0, 4.0]),
        np.array([1, 0], np.int32),
    )
    assert due.tolist() == [[0, 4], [16, 0]]


def test_settling_often_or_seldom_gives_the_same_account():
    rng = np.random.default_rng(1)
    often, seldom = Ledger(("a", "b"), ("gpu",), sample_s=7.0), Ledger(("a", "b"), ("gpu",), sample_s=1e9)
    now = 0.0
    for _ in range(60):
        view = view_of([(int(rng.integers(2)), 4, int(rng.integers(0, 3)), 0) for _ in range(4)])
        for ledger in (often, seldom):
            observe(ledger, view, now)
        for _ in range(3):
            now += float(rng.uniform(0, 20))
            often.settle(now)
    seldom.settle(now)
    np.testing.assert_allclose(often.account, seldom.account)
    means = often.over_time()
    whole = sum(means["gpus"]["a"]["received"]) * 7.0
    assert whole == pytest.approx(often._samples[-1][0, 0, RECEIVED])


def test_samples_stay_few_however_long_it_runs():
    ledger = Ledger(("a",), ("gpu",), sample_s=1.0)
    observe(ledger, view_of([(0, 8, 8, 0)]), 0.0, (1.0,))
    ledger.settle(50_000.0)
    times = ledger.over_time()["time_s"]
    assert len(times) <= 2048
    assert np.ptp(np.diff(times)) == 0


def test_a_user_who_joins_later_has_an_account_from_then_on():
    ledger = Ledger(("a",), ("gpu",), sample_s=10.0)
    observe(ledger, view_of([(0, 8, 8, 0)]), 0.0, (1.0,))
    ledger.settle(20.0)
    ledger.join("b")
    observe(ledger, view_of([(0, 8, 4, 0), (1, 8, 4, 0)]), 20.0)
    ledger.settle(40.0)
    assert ledger.account[1, 0, ENTITLED] == 80
    assert ledger.over_time()["gpus"]["b"]["received"] == [0, 0, 4, 4]
    assert ledger.worst_deviation(window_s=20.0) == 0


def test_the_ledger_survives_json():
    ledger = Ledger(("a", "b"), ("gpu",))
    observe(ledger, view_of([(0, 8, 8, 0)]), 0.0)
    ledger.settle(5000.0)
    again = Ledger.restored(json.loads(json.dumps(ledger.state())), ("gpu",))
    for one in (ledger, again):
        one.settle(9000.0)
    assert again.totals() == ledger.totals()
    assert again.over_time() == ledger.over_time()


def test_a_ledger_saved_before_its_first_user_goes_on_after_json():
    again = Ledger.restored(json.loads(json.dumps(Ledger((), ("gpu",)).state())), ("gpu",))
    again.join("a")
    observe(again, view_of([(0, 8, 8, 0)]), 0.0, (1.0,))
    again.settle(10.0)
    assert again.account[0, 0, RECEIVED] == 80
