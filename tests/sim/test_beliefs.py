"""What knowledge is worth: the scheduler may be wrong about a job, the job runs by its true profile."""

from __future__ import annotations

import numpy as np
import pytest

from shoal.core.cluster import Cluster
from shoal.core.errors import ShoalError
from shoal.policies.registry import make_policy
from shoal.sim.beliefs import Knowledge
from shoal.sim.engine import Simulation
from shoal.sim.inputs import read_jobs, read_profiles
from shoal.sim.samples import sample_path


@pytest.fixture(scope="module")
def sample():
    profiles = read_profiles(sample_path("profiles.csv"))
    jobs = read_jobs(sample_path("jobs.csv"), profiles, Cluster.pool(32))
    return jobs, profiles


def run(sample, knowledge, policy="afs-l", seed=0):
    jobs, profiles = sample
    simulation = Simulation(
        jobs, profiles, Cluster.pool(32), make_policy(policy), knowledge=Knowledge.parse(knowledge), seed=seed
    )
    record = simulation.run()
    return float((record.finish_s - [j.submit_s for j in jobs]).mean()), record


def test_an_error_of_nothing_is_the_truth(sample):
    assert run(sample, "wrong:0")[0] == pytest.approx(run(sample, "true")[0], rel=1e-9)


def test_large_errors_cost_completion_time_and_small_ones_little(sample):
    truth = run(sample, "true")[0]
    small = np.mean([run(sample, "wrong:0.05", seed=s)[0] for s in range(3)])
    large = np.mean([run(sample, "wrong:3", seed=s)[0] for s in range(3)])
    assert small == pytest.approx(truth, rel=0.03)
    assert large > truth * 1.02


def test_whatever_is_believed_the_work_done_is_the_true_work(sample):
    jobs, profiles = sample
    for knowledge in ("wrong:1", "learned:0.1"):
        _, record = run(sample, knowledge)
        assert np.isfinite(record.finish_s).all()
        alone = [j.iterations / profiles[j.model].curve("gpu").speed.max() for j in jobs]
        assert (record.finish_s - [j.submit_s for j in jobs] >= np.array(alone) * (1 - 1e-9)).all()


def test_learning_comes_near_to_knowing(sample):
    truth, blind = run(sample, "true")[0], run(sample, "wrong:5")[0]
    learned = run(sample, "learned:0.05")[0]
    assert learned < truth * 1.15
    assert learned < blind


@pytest.mark.parametrize("word", ["guess", "true:1", "wrong:x", "wrong:-1", "wrong:nan"])
def test_unknown_kinds_of_knowledge_are_refused(word):
    with pytest.raises(ShoalError):
        Knowledge.parse(word)
