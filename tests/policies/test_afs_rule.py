"""The rules of AFS in small cases that are computed by hand, and the tie-breaks of AFS-P on the sample."""

from __future__ import annotations

import numpy as np
import pytest

from shoal.core.cluster import Cluster
from shoal.core.errors import ShoalError
from shoal.policies.afs.afs_l import afs_l_shares
from shoal.policies.registry import make_policy
from shoal.sim.engine import Simulation
from shoal.sim.inputs import read_jobs, read_profiles
from shoal.sim.samples import sample_path

from . import naive


def shares(jobs, gpus):
    """jobs: (remaining, speeds by share, max)."""
    speeds, at = [0.0], []
    for _, curve, _ in jobs:
        at.append(len(speeds))
        speeds += curve
    most = np.array([m for *_, m in jobs], np.int32)
    return afs_l_shares(
        np.array([float(r) for r, *_ in jobs]),
        np.array([*speeds, 0.0]),
        np.array(at, np.int32),
        np.ones(len(jobs), np.int32),
        most,
        gpus,
    ).tolist()


SQRT = [0.0, 1.0, 1.41, 1.73, 2.0]


def test_of_two_jobs_without_a_share_the_shorter_at_one_gpu_goes_first():
    assert shares([(10, SQRT, 4), (5, SQRT, 4)], 1) == [0, 1]
    assert shares([(5, SQRT, 4), (10, SQRT, 4)], 1) == [1, 0]


def test_of_two_equal_jobs_without_a_share_the_later_goes_first():
    assert shares([(5, SQRT, 4), (5, SQRT, 4)], 1) == [0, 1]


def test_a_job_without_a_share_goes_before_a_second_gpu_that_does_not_double_the_speed():
    assert shares([(1, [0.0, 1.0, 1.99], 2), (1000, SQRT, 4)], 2) == [1, 1]


def test_a_second_gpu_that_doubles_the_speed_goes_before_a_job_without_a_share():
    assert shares([(1, [0.0, 1.0, 2.0], 2), (1000, SQRT, 4)], 2) == [2, 0]


def test_a_flat_curve_gains_nothing_and_loses_to_any_gain():
    flat, rising = [0.0, 1.0, 1.0, 1.0], [0.0, 1.0, 1.001, 1.002]
    assert shares([(1, flat, 3), (1, rising, 3)], 4) == [1, 3]


def test_a_job_at_its_cap_takes_no_part():
    assert shares([(1, SQRT, 2), (1000, SQRT, 4)], 6) == [2, 4]
    assert shares([(1, SQRT, 2), (1000, SQRT, 4)], 100) == [2, 4]


def test_the_denominators_differ_the_longer_job_is_measured_against_its_new_speed():
    # Short a: 1.0 -> 1.5 (gain 0.5 of its old speed). Long b: 1.0 -> 1.9 (gain 0.47 of its new speed, but
    # 0.9 of its old one). By the rule a wins; with equal denominators b would.
    a, b = (10, [0.0, 1.0, 1.5], 2), (20, [0.0, 1.0, 1.9], 2)
    assert shares([a, b], 3) == [2, 1]
    # A longer one that gains 0.4997 of its new speed wins against 0.49 of the shorter one's old: efficiency.
    c = (20, [0.0, 1.0, 1.999, 0.0], 2)
    assert shares([(10, [0.0, 1.0, 1.49], 2), c], 3) == [1, 2]


def test_the_relation_is_not_transitive_so_the_order_of_the_fold_matters():
    """A cycle: each of three jobs beats the next one. The winner depends on which two are compared first."""

    def beats(challenger, holder):
        (r1, now1, then1), (r0, now0, then0) = challenger, holder
        return naive.afs_prefers_challenger((now0, then0), (now1, then1), r0 / now0, r1 / now1)

    rng = np.random.default_rng(4)
    for _ in range(20_000):
        a, b, c = [(rng.uniform(1, 100), 1.0, rng.uniform(1.05, 1.9)) for _ in range(3)]
        if beats(a, b) and beats(b, c) and beats(c, a):
            break
    else:
        raise AssertionError("no cycle found")
    jobs = {name: (r, [0.0, now, then], 2) for name, (r, now, then) in zip("abc", (a, b, c))}
    winners = set()
    for order in ("abc", "bca", "cab"):
        given = shares([jobs[x] for x in order], 4)
        winners.add(order[given.index(2)])
    assert len(winners) > 1


def test_light_contention_favours_short_jobs_and_heavy_contention_efficient_ones():
    short = (10, [0.0, *[float(n) ** 0.75 for n in range(1, 33)]], 32)
    efficient = (1000, [0.0, *[float(n) ** 0.98 for n in range(1, 33)]], 32)
    few, many = shares([short, efficient], 4), shares([short, efficient], 40)
    assert few[0] >= few[1]
    assert many[1] > many[0]


def test_afs_p_with_ties_by_gain_completes_the_sample_as_soon_as_with_coins():
    pool, profiles = Cluster.pool(64), read_profiles(sample_path("profiles.csv"))
    jobs = read_jobs(sample_path("jobs.csv"), profiles, pool)
    submit_s = np.array([job.submit_s for job in jobs])

    def avg_jct_s(tie):
        record = Simulation(jobs, profiles, pool, make_policy("afs-p", {"tie": tie})).run()
        return float((record.finish_s - submit_s).mean())

    assert avg_jct_s("gain") <= 1.03 * avg_jct_s("coin")


def test_afs_p_breaks_ties_by_gain_unless_told_otherwise_and_knows_the_former_name_of_coin():
    assert make_policy("afs-p").options.tie == "gain"
    assert make_policy("afs-p", {"tie": "random"}).options.tie == "random"
    with pytest.raises(ShoalError, match="must be gain, coin, first or last"):
        make_policy("afs-p", {"tie": "dice"})
