"""Optimus, DRF and Tetris over parameter servers and workers: by hand, against plain code, and properties."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from shoal.core.cluster import Cluster
from shoal.core.errors import ShoalError
from shoal.core.events import Submitted
from shoal.core.job import GpuRange, Job, Kind
from shoal.core.profile import Profile
from shoal.policies.optimus import drf, parameter_servers, tetris
from shoal.policies.registry import make_policy
from shoal.scheduler.scheduler import Scheduler

#: θ of synchronous models fitted to measurements: steps per second as a function of servers and workers.
RESNET = [0.0039, 0.4178, 0.4213, 0.0074, 0.0]
TEXT = [0.0075, 0.3445, 0.0237, 0.0169, 0.0]
ONES = np.ones((1, 1))


def test_the_speed_table_is_the_model():
    speed = parameter_servers.sync_speed(np.array([RESNET]), np.array([32.0]), 4, 4)
    p, w = 2, 3
    seconds = 0.0039 * 32 / w + 0.4178 + 0.4213 * w / p + 0.0074 * w
    assert speed[0, p - 1, w - 1] == pytest.approx(1 / seconds)


def test_every_job_gets_one_of_each_before_any_gets_more():
    speed = np.ones((3, 3, 3)) * np.arange(1, 4)
    tasks = parameter_servers.allocate(np.array([1.0, 1.0, 1e6]), speed, *needs(3), np.array([5.0]))
    assert tasks.ps.tolist() == [1, 1, 0], "in order of arrival, until one does not fit"
    assert tasks.workers.tolist() == [2, 1, 0]


def needs(jobs: int, ps: float = 1.0, worker: float = 1.0):
    return np.full((jobs, 1), ps), np.full((jobs, 1), worker)


def test_the_next_task_goes_where_it_saves_most_time():
    # A second worker halves the time of either; job 1 has ten times as much left.
    speed = np.tile(np.array([[1.0, 2.0]]), (2, 1, 1))
    tasks = parameter_servers.allocate(np.array([10.0, 100.0]), speed, *needs(2), np.array([5.0]))
    assert tasks.workers.tolist() == [1, 2]


def test_a_server_wins_a_tie():
    speed = np.array([[[1.0, 2.0], [2.0, 0.0]]])
    tasks = parameter_servers.allocate(np.array([10.0]), speed, *needs(1), np.array([3.0]))
    assert (tasks.ps[0], tasks.workers[0]) == (2, 1)


def test_gains_are_counted_per_unit_of_the_dominant_resource():
    # The worker saves twice as much as the server but takes three times as much of what is scarce.
    speed = np.array([[[1.0, 1 / 0.6], [1 / 0.8, 0.0]]])
    tasks = parameter_servers.allocate(
        np.array([1.0]), speed, np.array([[1.0]]), np.array([[3.0]]), np.array([5.0])
    )
    assert (tasks.ps[0], tasks.workers[0]) == (2, 1)


def test_the_dominant_resource_is_the_one_of_which_a_task_takes_the_largest_part():
    amount = parameter_servers.dominant_amount(np.array([[2.0, 8.0, 1.0]]), np.array([16.0, 100.0, 2.0]))
    assert amount.tolist() == [1.0]  # 12.5 %, 8 %, 50 %


def test_young_jobs_are_damped():
    speed = np.tile(np.array([[1.0, 2.0]]), (2, 1, 1))
    args = (np.array([100.0, 98.0]), speed, *needs(2), np.array([5.0]))
    assert parameter_servers.allocate(*args).workers.tolist() == [2, 1]
    young = np.array([True, False])
    assert parameter_servers.allocate(*args, young=young).workers.tolist() == [1, 2]


def test_it_stops_where_more_would_slow_the_job_down():
    tasks = parameter_servers.allocate(
        np.array([1000.0]),
        np.array([[[1.0, 2.0, 1.5], [0.9, 1.9, 1.4], [0.5, 0.5, 0.5]]]),
        *needs(1),
        np.array([50.0]),
    )
    assert (tasks.ps[0], tasks.workers[0]) == (1, 2)


def test_it_ends_at_the_first_task_that_does_not_fit_or_goes_on_without_that_job():
    speed = np.tile(np.array([[1.0, 2.0, 3.0]]), (2, 1, 1))
    ps_needs, worker_needs = np.ones((2, 1)), np.array([[4.0], [1.0]])
    args = (np.array([1000.0, 1.0]), speed, ps_needs, worker_needs, np.array([9.0]))
    assert parameter_servers.allocate(*args).workers.tolist() == [1, 1]
    assert parameter_servers.allocate(*args, skip_misfits=True).workers.tolist() == [1, 3]


@st.composite
def jobs(draw):
    n = draw(st.integers(1, 5))
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    theta = np.array(
        [rng.choice([0, 1]) * np.array(RESNET) + rng.random() * np.array(TEXT) for _ in range(n)]
    )
    speed = parameter_servers.sync_speed(theta + 1e-3, rng.uniform(16, 128, n), 5, 6)
    return (
        rng.uniform(1, 1e4, n), speed, rng.uniform(0.5, 4, (n, 2)), rng.uniform(0.5, 4, (n, 2)),
        rng.uniform(5, 60, 2),
    )  # fmt: skip


@given(case=jobs(), skip=st.booleans())
@settings(max_examples=100, deadline=None)
def test_the_kernel_equals_the_rule_written_plainly_and_stays_within_the_cluster(case, skip):
    tasks = parameter_servers.allocate(*case, skip_misfits=skip)
    expected = reference(*case, skip)
    assert list(zip(tasks.ps.tolist(), tasks.workers.tolist())) == expected
    used = (tasks.ps[:, None] * case[2] + tasks.workers[:, None] * case[3]).sum(axis=0)
    assert (used <= case[4] + 1e-6).all()


def reference(left, speed, ps_needs, worker_needs, capacity, skip):
    free, got = capacity.copy(), [(0, 0)] * len(left)
    for j in range(len(left)):
        if (ps_needs[j] + worker_needs[j] <= free + 1e-9).all():
            free -= ps_needs[j] + worker_needs[j]
            got[j] = (1, 1)
    open_jobs = {j for j, (p, _) in enumerate(got) if p}
    while open_jobs:
        options = []
        for j in sorted(open_jobs):
            p, w = got[j]
            for kind, need, (p2, w2) in ((0, ps_needs[j], (p + 1, w)), (1, worker_needs[j], (p, w + 1))):
                if p2 <= speed.shape[1] and w2 <= speed.shape[2]:
                    amount = need[np.argmax(need / capacity)]
                    gain = (left[j] / speed[j, p - 1, w - 1] - left[j] / speed[j, p2 - 1, w2 - 1]) / amount
                    options.append((-gain, j, kind, (p2, w2), need))
        options.sort(key=lambda o: o[:3])
        if not options or options[0][0] >= 0:
            break
        _, j, _, then, need = options[0]
        if (need <= free + 1e-9).all():
            free -= need
            got[j] = then
        elif skip:
            open_jobs.discard(j)
        else:
            break
    return got


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"left": np.array([np.nan])}, "finite"),
        ({"speed": np.ones((2, 2, 2))}, "servers, workers"),
        ({"ps": np.ones((1, 2))}, "1 resources"),
        ({"ps": np.zeros((1, 1))}, "need something"),
    ],
)
def test_impossible_input_is_refused(change, message):
    with pytest.raises(ShoalError, match=message):
        parameter_servers.allocate(
            change.get("left", np.array([1.0])), change.get("speed", np.ones((1, 2, 2))),
            change.get("ps", ONES), ONES, np.array([4.0]),
        )  # fmt: skip


def test_drf_evens_out_dominant_shares():
    # The example of the DRF paper: 9 CPU and 18 GB; A takes (1, 4), B takes (3, 1): 3 of A, 2 of B.
    bundles = drf.allocate(np.array([[1.0, 4.0], [3.0, 1.0]]), np.array([9.0, 18.0]), skip_misfits=True)
    assert bundles.tolist() == [3, 2]


def test_drf_ends_at_the_first_misfit_or_at_the_most_a_job_may_have():
    needs = np.array([[4.0], [1.0]])
    assert drf.allocate(needs, np.array([10.0])).tolist() == [1, 4]
    assert drf.allocate(needs, np.array([10.0]), skip_misfits=True).tolist() == [1, 6]
    assert drf.allocate(np.array([[1.0]]), np.array([100.0])).tolist() == [16]


def test_tetris_prefers_the_aligned_and_the_short():
    capacity = np.array([[4.0, 4.0]])
    equal = np.array([[2.0, 2.0], [2.0, 2.0]])
    assert tetris.place(capacity, equal, np.array([1.0, 0.1]), 1)[:, 0].tolist() == [1, 1]
    assert tetris.place(capacity, 2 * equal, np.array([1.0, 0.1])).ravel().tolist() == [0, 1]
    assert tetris.place(capacity, 2 * equal, np.array([1.0, 0.1]), prefer_long=True).ravel().tolist() == [
        1,
        0,
    ]
    aligned = tetris.place(np.array([[4.0, 1.0]]), np.array([[2.0, 0.0], [0.0, 1.0]]), np.array([0.0, 0.0]))
    assert aligned.ravel().tolist() == [2, 1]


@given(seed=st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_tetris_and_drf_stay_within_what_there_is(seed):
    rng = np.random.default_rng(seed)
    capacity = rng.uniform(1, 16, (3, 2))
    needs = rng.uniform(0.5, 5, (4, 2))
    placed = tetris.place(capacity, needs, rng.random(4))
    assert (np.einsum("jn,jr->nr", placed, needs) <= capacity + 1e-6).all()
    assert (placed.sum(axis=1) <= 16).all()
    bundles = drf.allocate(needs, capacity.sum(axis=0))
    assert (bundles @ needs <= capacity.sum(axis=0) + 1e-6).all()


def test_a_job_of_unknown_length_keeps_what_it_starts_with_and_stops_no_one():
    profile = Profile.of_servers(
        "m", parameter_servers.sync_speed(np.array([RESNET]), np.array([32.0]), 8, 8)[0]
    )
    scheduler = Scheduler(Cluster.pool(8), make_policy("optimus"))
    jobs = [
        Job(f"j{i}", 0.0, GpuRange(1, 8), 2, iterations=work, kind=Kind.PARAMETER_SERVER)
        for i, work in enumerate((None, 100.0))
    ]
    scheduler.step(0.0, [Submitted(i, job, profile) for i, job in enumerate(jobs)])
    assert (scheduler.view.servers[0], scheduler.view.gpus[0]) == (1, 1)
    assert scheduler.view.servers[1] > 1
