"""Split stride: the test vectors, and the kernel against the plain form."""

from fractions import Fraction as F

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.core.errors import ShoalError
from shoal.policies.gandiva_fair.accounts import settle
from shoal.policies.gandiva_fair.dues import center_lags
from shoal.policies.gandiva_fair.quantum import split_stride
from shoal.policies.gandiva_fair.split_stride import SplitStride, aggregate_pass
from shoal.policies.gandiva_fair.stride import GangStride, Strider
from shoal.policies.gandiva_fair.tables import SPANS, Jobs, Nodes, Spans


def two_nodes(tickets_a, homes_of_b):
    cluster = SplitStride([4, 4])
    cluster.add(Strider("A", F(tickets_a), 8), {0: 4, 1: 4})
    for i, node in enumerate(homes_of_b):
        cluster.add(Strider(f"B{i}", F(1, 4), 2), {node: 2})
    return cluster


def mean_gpus(cluster, quanta=1200):
    had = {"A": 0, "B": 0}
    for _ in range(quanta):
        for name in cluster.quantum():
            had[name[0]] += 8 if name == "A" else 2
    return {user: gpus / quanta for user, gpus in had.items()}


@pytest.mark.parametrize(
    ("tickets_a", "homes_of_b", "a", "b"),
    [
        pytest.param(1, [0, 0, 1, 1], 4.0, 4.0, id="balanced nodes give equal users equal GPUs"),
        pytest.param(1, [0, 0, 0, 0], 8 / 3, 8 / 3, id="unbalanced nodes waste a third of the GPUs"),
        pytest.param(3, [0, 0, 1, 1], 6.0, 2.0, id="three tickets to one"),
    ],
)
def test_mean_gpus_per_user(tickets_a, homes_of_b, a, b):
    had = mean_gpus(two_nodes(tickets_a, homes_of_b))
    assert had["A"] == pytest.approx(a, abs=0.01)
    assert had["B"] == pytest.approx(b, abs=0.01)


def test_the_aggregate_advances_like_one_job_with_the_sum_of_tickets():
    jobs = [Strider("a", F(1), 2, F(3)), Strider("b", F(2), 1, F(1, 2))]
    before = aggregate_pass(jobs)
    assert aggregate_pass([jobs[0].ran(), jobs[1].ran()]) - before == F(2 + 1, 1 + 2)


def random_cluster(rng):
    nodes = rng.integers(1, 5)
    gpus = rng.integers(1, 9, nodes)
    cluster = SplitStride(gpus.tolist())
    for i in range(rng.integers(0, 13)):
        tickets, passed = float(rng.integers(1, 5)) / 4, float(rng.integers(0, 12)) / 4
        if nodes > 1 and rng.random() < 0.3:
            on = rng.choice(nodes, rng.integers(2, nodes + 1), replace=False)
            home = {int(s): int(rng.integers(1, gpus[s] + 1)) for s in sorted(on)}
        else:
            s = int(rng.integers(nodes))
            home = {s: int(rng.integers(1, gpus[s] + 1))}
        cluster.add(Strider(f"j{i}", tickets, sum(home.values()), passed), home)
    return cluster


def as_arrays(cluster):
    jobs, homes = cluster.jobs, cluster.homes
    home = np.full(len(jobs), -1, np.int32)
    start, node, gpus = [0], [], []
    for i, h in enumerate(homes):
        if len(h) == 1:
            home[i] = next(iter(h))
        else:
            home[i] = SPANS - (len(start) - 1)
            node += list(h)
            gpus += list(h.values())
            start.append(len(node))
    passed = np.array([float(j.passed) for j in jobs])
    return {
        "order": np.argsort(passed, kind="stable"),
        "passed": passed,
        "jobs": Jobs(
            size=np.array([j.size_gpus for j in jobs], np.int32),
            home=home,
            due=np.array([float(j.tickets) for j in jobs]),
        ),
        "spans": Spans(
            rows=np.flatnonzero(home <= SPANS),
            start=np.array(start, np.int32),
            node=np.array(node, np.int32),
            gpus=np.array(gpus, np.int32),
        ),
        "nodes": Nodes(
            np.array(cluster.gpus_of_node, np.int32), np.zeros(len(cluster.gpus_of_node), np.int32)
        ),
        "eligible": np.ones(len(jobs), bool),
        "keep": np.zeros(len(jobs), bool),
        "behind": np.zeros(len(jobs), bool),
        "may_move": np.zeros(len(jobs), bool),
        "most_moves": 8,
    }


def test_the_kernel_equals_the_plain_form_on_thousands_of_random_clusters():
    rng = np.random.default_rng(3)
    for _ in range(3000):
        cluster = random_cluster(rng)
        arrays = as_arrays(cluster)
        # Some go on from the quantum before: any set that fits.
        running = [i for i in cluster.pick() if rng.random() < 0.4]
        arrays["keep"][running] = True
        runs, free, moves = split_stride(**arrays)
        assert len(moves) == 0
        want = cluster.pick(running)
        assert np.flatnonzero(runs).tolist() == want
        used = [sum(cluster.homes[i].get(s, 0) for i in want) for s in range(len(free))]
        assert (free == np.array(cluster.gpus_of_node) - used).all()
        assert (free >= 0).all()
        for i, home in enumerate(cluster.homes):  # no GPU idles while a waiting gang fits
            assert runs[i] or any(free[s] < g for s, g in home.items())


def gangs_that_move(may_move, most_moves=8):
    """Two nodes of 4 GPUs: on node 0 rows 0 and 1, gangs of 4 with passes 0 and 1; on node 1 row 2 with pass 2."""
    cluster = SplitStride([4, 4])
    for i, node in enumerate([0, 0, 1]):
        cluster.add(Strider(f"j{i}", 1.0, 4, float(i)), {node: 4})
    arrays = as_arrays(cluster)
    arrays["behind"][may_move] = arrays["may_move"][may_move] = True
    runs, free, moves = split_stride(**arrays | {"most_moves": most_moves})
    assert free.tolist() == [0, 0]
    return np.flatnonzero(runs).tolist(), list(moves)


def test_a_gang_that_may_move_runs_elsewhere_before_gangs_with_a_higher_pass():
    assert gangs_that_move([]) == ([0, 2], [])
    assert gangs_that_move([1]) == ([0, 1], [(1, 1, 4)])
    assert gangs_that_move([1], most_moves=0) == ([0, 2], [])


def test_a_gang_that_may_move_stays_where_it_fits():
    assert gangs_that_move([0]) == ([0, 2], [])


def test_a_gang_that_spans_nodes_moves_to_the_nodes_with_the_most_free_gpus():
    cluster = SplitStride([4, 4, 4])
    cluster.add(Strider("small", 1.0, 1, 0.0), {0: 1})
    cluster.add(Strider("big", 1.0, 8, 1.0), {0: 4, 1: 4})
    arrays = as_arrays(cluster)
    assert np.flatnonzero(split_stride(**arrays)[0]).tolist() == [0]
    arrays["behind"][1] = arrays["may_move"][1] = True
    runs, free, moves = split_stride(**arrays)
    assert runs.all()
    assert sorted(moves) == [(1, 1, 4), (1, 2, 4)]
    assert free.tolist() == [3, 0, 0]


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 6), st.lists(st.integers(1, 4), min_size=1, max_size=6))
def test_a_gang_that_spans_nodes_never_starves(tickets, small):
    cluster = SplitStride([4, 4])
    cluster.add(Strider("big", F(1), 8), {0: 4, 1: 4})
    for i, size in enumerate(small):
        cluster.add(Strider(f"s{i}", F(tickets), size), {i % 2: size})
    ran = sum("big" in cluster.quantum() for _ in range(400))
    nodes = [sum(tickets for i in range(len(small)) if i % 2 == s) for s in (0, 1)]
    assert ran >= 400 // (8 + max(nodes) * 8 + 1)


def test_jobs_are_compared_with_their_users_other_jobs_only():
    lag = np.array([-50.0, -10.0, 2.0])
    rate = np.array([2.0, 1.0, 1.0])
    apart = lag[0] / rate[0] - lag[1] / rate[1]
    center_lags(lag, rate, np.array([0, 0, 1], np.int32), np.zeros(3, np.int32), 2, 1)
    assert lag.tolist() == [-10.0, 10.0, 0.0]
    assert lag[0] / rate[0] - lag[1] / rate[1] == apart


@pytest.mark.parametrize("owners", [(0, 0, 0), (0, 1, 2)], ids=["of one user", "of three users"])
def test_lags_of_jobs_and_users_are_those_of_gang_stride(owners):
    """Charging lags by time is the same as keeping passes, quantum by quantum, among siblings and users."""
    node = GangStride(4, [Strider(n, float(t), s) for n, t, s in (("a", 1, 3), ("b", 2, 2), ("c", 1, 2))])
    rate, size = np.array([1.0, 2.0, 1.0]), np.array([3, 2, 2])
    user, gpu_type = np.array(owners, np.int32), np.zeros(3, np.int32)
    lag, beyond, part = np.zeros(3), np.zeros((3, 1)), np.zeros((3, 1))
    np.add.at(part[:, 0], user, rate)
    for _ in range(50):
        names = node.quantum()
        gpus = size * np.array([name in names for name in "abc"])
        lag += gpus - rate
        center_lags(lag, rate, user, gpu_type, 3, 1)
        had = np.zeros((3, 1))
        np.add.at(had[:, 0], user, gpus)
        settle(had, part, 1.0, beyond)
        passed = lag / rate + beyond[user, 0] / part[user, 0]
        np.testing.assert_allclose(passed * rate, [node.lag(name) for name in "abc"], atol=1e-9)


def test_a_home_that_does_not_hold_the_gang_is_refused():
    cluster = SplitStride([4])
    with pytest.raises(ShoalError, match="gang of 8"):
        cluster.add(Strider("a", F(1), 8), {0: 4})
