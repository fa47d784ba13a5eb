"""What knowledge is worth: the scheduler may be wrong about a job, the job runs by its true profile."""

from __future__ import annotations

import numpy as np
import pytest

from shoal.core.cluster import Cluster
from shoal.core.errors import ShoalError
from shoal.core.job import GpuRange, Job, Kind
from shoal.core.profile import Profile
from shoal.policies.optimus.parameter_servers import sync_speed
from shoal.policies.registry import make_policy
from shoal.sim.engine import Simulation
from shoal.sim.inputs import read_jobs, read_profiles
from shoal.sim.known_profiles import Knowledge, WrongProfiles
from shoal.sim.learned_profiles import LearnedProfiles
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


#: Each node more takes a fifth of the speed.
SPREAD = Profile.from_rows(
    "spread", [("*", g, n, 1.25 ** (n - 1) / g) for g in range(1, 9) for n in range(1, min(g, 4) + 1)]
)
SERVERS = Profile.of_servers(
    "servers", sync_speed(np.array([[1.0, 0.1, 0.5, 0.02, 0.01]]), np.array([1.0]), 6, 8)[0]
)


def one_job(profile, kind=Kind.ALL_REDUCE):
    return [Job("a", 0.0, GpuRange(1, 8), 1, model=profile.model, iterations=100.0, kind=kind)], [profile]


def test_wrong_profiles_are_wrong_about_nodes_too_and_right_without_error():
    jobs, profiles = one_job(SPREAD)
    right = WrongProfiles(jobs, profiles, 0.0, np.random.default_rng(1)).profile(0)
    for gpus, nodes in ((4, 1), (4, 2), (8, 4)):
        assert right.speed("x", gpus, nodes) == pytest.approx(SPREAD.speed("x", gpus, nodes))
    losses = [
        p.speed("x", 4, 2) / p.speed("x", 4, 1)
        for p in (WrongProfiles(jobs, profiles, 0.3, np.random.default_rng(s)).profile(0) for s in range(200))
    ]
    assert np.exp(np.mean(np.log(losses))) == pytest.approx(0.8, rel=0.05)
    assert min(losses) < 0.75 < 0.85 < max(losses)


def test_what_jobs_lose_on_more_nodes_is_learned_from_the_placements_they_had():
    jobs, profiles = one_job(SPREAD)
    known = LearnedProfiles(jobs, profiles, Cluster.of(4, 2), 0.01, np.random.default_rng(0))
    assert known.profile(0).speed("gpu", 4, 4) == known.profile(0).speed("gpu", 4, 2), "nothing known yet"
    for gpus, nodes in ((1, 1), (2, 1), (2, 2), (4, 2), (4, 4), (6, 3), (8, 4)):
        known.measure(0, gpus, nodes, "gpu", SPREAD.speed("gpu", gpus, nodes))
    learned = known.profile(0)
    assert learned.speed("gpu", 4, 4) == pytest.approx(SPREAD.speed("gpu", 4, 4), rel=0.05)
    assert learned.speed("gpu", 4, 3) < learned.speed("gpu", 4, 2)  # never measured, but told


def test_servers_and_workers_are_learned_by_the_model_of_optimus():
    jobs, profiles = one_job(SERVERS, Kind.PARAMETER_SERVER)
    known = LearnedProfiles(jobs, profiles, Cluster.pool(8), 0.02, np.random.default_rng(0))
    assert not known.measure(0, 4, 1, "gpu", 1.0), "without the number of servers nothing is learned"
    for servers, workers in ((1, 1), (2, 2), (1, 4), (4, 1), (4, 4), (6, 8), (2, 8)):
        rate = float(SERVERS.by_servers[servers - 1, workers - 1])
        known.measure(0, workers, 1, "gpu", rate, servers)
    error = np.abs(known.profile(0).by_servers / SERVERS.by_servers - 1)
    assert error.mean() < 0.05


def test_wrong_profiles_keep_the_servers_of_a_job_and_are_wrong_about_them():
    jobs, profiles = one_job(SERVERS, Kind.PARAMETER_SERVER)
    estimate = WrongProfiles(jobs, profiles, 0.3, np.random.default_rng(0)).profile(0).by_servers
    ratio = estimate / SERVERS.by_servers
    assert ratio.shape == (6, 8)
    assert ratio.std() > 0.01
    right = WrongProfiles(jobs, profiles, 0.0, np.random.default_rng(0)).profile(0).by_servers
    np.testing.assert_allclose(right, SERVERS.by_servers)


def test_in_a_run_with_parameter_servers_their_speeds_are_learned_as_jobs_train():
    jobs = [
        Job(
            f"j{i}",
            40.0 * i,
            GpuRange(1, 8),
            2,
            model="servers",
            iterations=200.0,
            kind=Kind.PARAMETER_SERVER,
        )
        for i in range(12)
    ]
    simulation = Simulation(
        jobs,
        {"servers": SERVERS},
        Cluster.pool(12),
        make_policy("optimus"),
        knowledge=Knowledge.parse("learned:0.02"),
    )
    before = np.abs(simulation.known.profile(0).by_servers / SERVERS.by_servers - 1).mean()
    record = simulation.run()
    assert np.isfinite(record.finish_s).all()
    after = np.abs(simulation.known.profile(0).by_servers / SERVERS.by_servers - 1).mean()
    assert after < 0.25 < before
