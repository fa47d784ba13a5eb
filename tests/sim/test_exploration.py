"""Exploration in the simulator: learned profiles lead to the shares that true ones give."""

from __future__ import annotations

import numpy as np
import pytest

from shoal.core.cluster import Cluster
from shoal.core.errors import ShoalError
from shoal.core.job import GpuRange, Job
from shoal.core.profile import ANY_TYPE, Profile, SpeedCurve
from shoal.policies.registry import make_policy
from shoal.sim.costs import Costs
from shoal.sim.engine import Simulation
from shoal.sim.known_profiles import Knowledge

GPUS = np.arange(1, 9)


def profile(model: str, speed: np.ndarray) -> Profile:
    return Profile(model, {ANY_TYPE: {0: SpeedCurve(np.concatenate([[0.0], speed]))}})


PROFILES = {
    "perfect": profile("perfect", 10.0 * GPUS),
    "root": profile("root", 10.0 * GPUS**0.5),
    "flat": profile("flat", np.full(8, 10.0)),
    "worse": profile("worse", 10.0 / GPUS),
}


def simulation(models: tuple[str, ...], policy: str, gpus: int, knowledge: str) -> Simulation:
    jobs = [
        Job(model, 60.0 * i, GpuRange(1, gpus), 1, model=model, iterations=2e5)
        for i, model in enumerate(models)
    ]
    return Simulation(
        jobs, PROFILES, Cluster.pool(gpus, "v"), make_policy(policy, {}),
        knowledge=Knowledge.parse(knowledge), costs=Costs("concurrent"),
    )  # fmt: skip


def shares_at(sim: Simulation, at_s: float) -> list[int]:
    """GPUs of each job at this time."""
    record = sim.run(lambda now_s, done, total: now_s < at_s, every=1)
    shares = [0] * len(sim.jobs)
    for when, job, gpus in zip(record.change_s, record.change_job, record.change_gpus):
        if when <= at_s:
            shares[job] = gpus
    return shares


@pytest.mark.parametrize("policy", ["optimus", "afs-p", "afs-l", "fair-afs"])
@pytest.mark.parametrize(
    ("models", "gpus"),
    [(("perfect", "flat"), 4), (("perfect", "worse"), 4), (("worse",), 4), (("perfect", "root", "flat"), 8)],
)
def test_shares_become_those_under_true_profiles(policy: str, models: tuple[str, ...], gpus: int) -> None:
    true = shares_at(simulation(models, policy, gpus, "true"), 1500.0)
    explored = simulation(models, policy, gpus, "learned:0.02")
    assert shares_at(explored, 1500.0) == true
    spent = explored.record.extra["exploration"]["gpu_s"]
    assert 0 < spent <= 0.02 * gpus * (3600.0 + explored.record.end_s)


@pytest.mark.parametrize("policy", ["optimus", "afs-p", "fair-afs"])
def test_without_exploration_a_job_that_does_not_scale_keeps_gpus(policy: str) -> None:
    alone = simulation(("perfect", "flat"), policy, 4, "learned:0.02:0")
    assert shares_at(alone, 1500.0) == [2, 2]
    assert "exploration" not in alone.record.extra


def test_true_profiles_and_policies_that_do_not_use_speeds_are_not_explored() -> None:
    assert simulation(("perfect", "flat"), "afs-l", 4, "true").scheduler.exploration is None
    even = simulation(("perfect", "flat"), "max-min", 4, "learned")
    assert shares_at(even, 1000.0) == [2, 2]
    assert even.record.extra["exploration"] == {"trials": 0, "gpu_s": 0.0}


@pytest.mark.parametrize("seed", range(4))
def test_no_trial_breaks_a_rule_on_random_jobs(seed: int) -> None:
    rng = np.random.default_rng(seed)
    models = list(PROFILES)
    jobs, submit_s = [], 0.0
    for i in range(30):
        submit_s += float(rng.exponential(400.0))
        low = int(rng.integers(1, 4))
        high = int(rng.integers(low, 9))
        model = models[int(rng.integers(len(models)))]
        work = float(rng.uniform(2e3, 4e4))
        jobs.append(Job(f"j{i}", submit_s, GpuRange(low, high), low, model=model, iterations=work))
    cluster, policy = Cluster.pool(8, "v"), ("afs-l", "afs-p", "optimus", "fair-afs")[seed]
    sim = Simulation(
        jobs, PROFILES, cluster, make_policy(policy, {}),
        knowledge=Knowledge.parse("learned:0.05"), costs=Costs("concurrent"), seed=seed,
    )  # fmt: skip
    scheduler, step = sim.scheduler, sim.scheduler.step
    assert scheduler.exploration is not None
    measured = 0

    def checked(now_s: float, events: list) -> object:  # type: ignore[type-arg]
        nonlocal measured
        plan = step(now_s, events)
        view, trials = scheduler.view, scheduler.exploration.trials
        assert int(view.gpus.sum()) <= 8
        in_trials = [m.job_id for t in trials for m in t.members]
        assert len(in_trials) == len(set(in_trials))
        for job_id, gpus in zip(view.job_ids.tolist(), view.gpus.tolist()):
            low, high = scheduler.jobs[job_id].gpus.min, scheduler.jobs[job_id].gpus.max
            assert gpus == 0 or low <= gpus <= high
        if trials:
            assert (view.gpus > 0).all(), "a job waits during a trial"
            measured += 1
        return plan

    sim.scheduler.step = checked  # type: ignore[method-assign,assignment]
    record = sim.run()
    assert np.isfinite(record.finish_s).all()
    assert measured > 0
    spent = record.extra["exploration"]["gpu_s"]
    assert spent <= 0.02 * 8 * (3600.0 + record.end_s)


def test_a_wrong_word_for_the_knowledge_is_refused_in_one_line() -> None:
    for word in ("learned:0.05:2", "learned:x", "true:1", "wrong:0.1:0.1", "guessed", "learned:0.1:0.1:0.1"):
        with pytest.raises(ShoalError, match="--knowledge"):
            Knowledge.parse(word)
    assert str(Knowledge.parse("learned:0.05:0")) == "learned:0.05:0"
    assert str(Knowledge.parse("learned")) == "learned:0.05"
