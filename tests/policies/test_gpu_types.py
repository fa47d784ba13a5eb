"""Policies that only count GPUs, on a cluster of two types whose speeds are measured to different sizes."""

from __future__ import annotations

from itertools import count

import numpy as np
import pytest

from shoal.core.cluster import Cluster, Node
from shoal.core.events import Submitted
from shoal.core.job import GpuRange, Job
from shoal.core.profile import Profile
from shoal.policies.gpu_types import reference_curves, times_as_requested
from shoal.policies.registry import make_policy, policy_names
from shoal.scheduler.scheduler import Scheduler
from shoal.sim.engine import Simulation

CLUSTER = Cluster((Node("a", 8, "quick"), Node("b", 8, "slow")))
#: The quick type is known for up to 4 GPUs only, the slow one for up to 8.
PROFILE = Profile.from_rows(
    "m", [("quick", n, 0, 0.5 / n) for n in (1, 2, 4)] + [("slow", n, 0, 2.0 / n) for n in (1, 2, 4, 8)]
)


def job(name, least, most, requested, submit_s=0.0):
    return Job(name, submit_s, GpuRange(least, most), requested, model="m", iterations=1000.0)


def test_the_reference_curve_is_that_of_the_fastest_type_with_room_for_the_minimum():
    scheduler = Scheduler(CLUSTER, make_policy("max-min"))
    jobs = [job("any", 1, 8, 2), job("wide", 6, 8, 8), job("many", 1, 8, 8)]
    scheduler.step(0.0, [Submitted(i, j, PROFILE) for i, j in enumerate(jobs)])
    view = scheduler.view
    at, most = reference_curves(view)
    assert most.tolist() == [4, 8, 4]
    quick, slow = view.speed_at
    assert at.tolist() == [quick[0], slow[1], quick[2]]
    times_s = times_as_requested(view, view.total)
    assert times_s.tolist() == pytest.approx([250.0, 250.0, 250.0])  # at 2 of the quick, 8 of the slow ones


@pytest.mark.parametrize("name", policy_names())
def test_no_policy_reads_beyond_the_end_of_the_reference_curve(name):
    rng = np.random.default_rng(7)
    jobs = []
    for i in range(40):
        least = int(rng.choice([1, 1, 1, 2, 6]))
        requested = int(rng.integers(least, 9))
        jobs.append(job(f"j{i}", least, 8, requested, submit_s=float(60 * i)))
    record = Simulation(jobs, {"m": PROFILE}, CLUSTER, make_policy(name)).run()
    assert np.isfinite(record.finish_s).all()


def test_a_gang_runs_on_a_type_whose_profile_knows_its_size():
    scheduler = Scheduler(CLUSTER, make_policy("fifo"))
    jobs = [job("large", 1, 8, 8), job("small", 1, 8, 4)]
    scheduler.step(0.0, [Submitted(i, j, PROFILE) for i, j in enumerate(jobs)])
    assert scheduler.view.gpus.tolist() == [8, 4]
    assert [CLUSTER.gpu_types[t] for t in scheduler.view.gpu_type] == ["slow", "quick"]


@pytest.mark.parametrize("name", ["afs-l", "afs-p", "optimus"])
def test_evidence_is_of_the_type_that_the_job_runs_on(name):
    scheduler = Scheduler(CLUSTER, make_policy(name))
    scheduler.step(0.0, [Submitted(i, job(f"j{i}", 1, 8, 2), PROFILE) for i in range(5)])
    types = set()
    for row in range(5):
        gpus, gpu_type = int(scheduler.view.gpus[row]), int(scheduler.view.gpu_type[row])
        types.add(gpu_type)
        evidence = scheduler.policy.evidence(scheduler.view, row, 0.0)
        if "remaining_s" in evidence:
            assert evidence["remaining_s"] == pytest.approx(1000 * (0.5, 2.0)[gpu_type] / gpus)
    assert types == {0, 1}


@pytest.mark.parametrize("name", ["tiresias-l", "tiresias-g"])
def test_a_demoted_job_causes_no_wake_up_if_requests_fit_by_number_but_not_by_type(name):
    jobs = [
        Job(f"j{i}", 0.0, GpuRange(1, 8), 4, model="m", iterations=1000.0, gpu_types=("quick",))
        for i in range(3)
    ]
    options = {"service": "since-start", "thresholds_gpu_s": "10,20"}
    if name == "tiresias-g":
        options["distribution_gpu_s"] = "30,60,900"
    plans = count()
    simulation = Simulation(jobs, {"m": PROFILE}, CLUSTER, make_policy(name, options))
    record = simulation.run(lambda *_: next(plans) < 200, 1)
    assert np.isfinite(record.finish_s).all(), "time goes on"


@pytest.mark.parametrize("lease_s", [1.1, 3.3, 33.3, 333.3, 599.9, 600.0])
def test_the_next_lease_of_themis_begins_later_than_now(lease_s):
    policy = make_policy("themis", {"lease_s": lease_s})
    for leases in range(0, 100_000, 7):
        now_s = leases * lease_s
        assert now_s < policy._next_lease_s(now_s) <= now_s + 1.000001 * lease_s
