"""Simulations of Tiresias, Themis and AFS-P end every job when their plain simulators do."""

from __future__ import annotations

import numpy as np
import pytest

from shoal.core.cluster import Cluster
from shoal.core.job import GpuRange, Job
from shoal.core.profile import Profile
from shoal.policies.registry import make_policy
from shoal.sim.engine import Simulation

from .twins import AfsP, Rule, Themis, Tiresias, TiresiasOfAfs, Twin, simulate

GPUS, JOBS, SEEDS = 16, 60, range(20)


def random_runs(seed: int) -> tuple[list[Job], list[Twin], Profile]:
    """Jobs of 1 to 16 GPUs that arrive while others run, all at different times."""
    rng = np.random.default_rng(seed)
    speed = [0.0, *(n ** float(rng.uniform(0.5, 1.0)) for n in range(1, GPUS + 1))]
    profile = Profile.of("m", {n: 1 / s for n, s in enumerate(speed) if n})
    submit = np.cumsum(rng.exponential(9.0, JOBS))
    jobs, twins = [], []
    for i, at in enumerate(submit.tolist()):
        want, work = int(2 ** rng.integers(0, 5)), float(rng.lognormal(4, 1.3))
        jobs.append(Job(f"j{i}", at, GpuRange(1, want), want, model="m", iterations=work))
        twins.append(Twin(i, at, work, want, speed))
    return jobs, twins, profile


def compare(policy: str, options: dict[str, str], rule: Rule, seed: int) -> int:
    """Check that the ends are equal; return the number of share changes."""
    jobs, twins, profile = random_runs(seed)
    record = Simulation(jobs, {"m": profile}, Cluster.pool(GPUS), make_policy(policy, options)).run()
    assert record.finish_s.tolist() == pytest.approx(simulate(twins, rule), rel=1e-9), f"seed {seed}"
    return int(record.changes.sum())


@pytest.mark.parametrize("thresholds", [(400.0,), (150.0, 900.0, 5000.0)])
@pytest.mark.parametrize("promote", [0.0, 3.0])
@pytest.mark.parametrize(("service", "twin"), [("attained", Tiresias), ("since-start", TiresiasOfAfs)])
def test_tiresias_demotes_and_promotes_like_its_plain_simulator(
    service: str, twin: type[Tiresias | TiresiasOfAfs], thresholds: tuple[float, ...], promote: float
) -> None:
    options = {
        "service": service,
        "thresholds_gpu_s": ",".join(map(str, thresholds)),
        "promote": f"{promote}",
    }
    changes = [compare("tiresias-l", options, twin(GPUS, thresholds, promote), seed) for seed in SEEDS]
    assert sum(changes) > 1.2 * JOBS * len(SEEDS), "jobs were preempted and resumed"


@pytest.mark.parametrize("lease_s", [60.0, 600.0])
def test_themis_gives_gpus_to_the_largest_rho_when_leases_end(lease_s: float) -> None:
    options = {"lease_s": str(lease_s)}
    changes = [compare("themis", options, Themis(GPUS, lease_s), seed) for seed in SEEDS]
    assert sum(changes) > 1.2 * JOBS * len(SEEDS), "shares changed while jobs ran"


@pytest.mark.parametrize("tie", ["first", "last", "gain"])
@pytest.mark.parametrize("quantum_s", [20.0, 200.0])
def test_afs_p_uses_quanta_and_folds_in_their_order(tie: str, quantum_s: float) -> None:
    options = {"quantum_s": str(quantum_s), "tie": tie}
    changes = [compare("afs-p", options, AfsP(GPUS, quantum_s, tie), seed) for seed in SEEDS]
    assert sum(changes) > 2 * JOBS * len(SEEDS), "jobs were preempted, resumed and resized"
