"""What a placement cannot use for those who were to have it goes to others that wait."""

from __future__ import annotations

import numpy as np
import pytest

from shoal.core.cluster import Cluster, Node
from shoal.core.job import GpuRange, Job
from shoal.core.profile import Profile
from shoal.placement.registry import Setting, make_placer
from shoal.policies.registry import make_policy
from shoal.sim.engine import Simulation

NODES = Cluster((Node("wide", 4, "gpu", "r", "d"), Node("narrow", 3, "gpu", "r", "d")))
PROFILE = Profile.of("m", {n: 1 / n for n in range(1, 8)})


def finished(name: str, options: dict[str, str]) -> list[bool]:
    """Of a job of 6 GPUs, which are never those of whole nodes, and ten of 2."""
    policy = make_policy(name, options)
    sizes = [6] + [2] * 10
    jobs = [
        Job(f"j{i}", float(i), GpuRange(n, n), n, model="m", iterations=50.0 * n) for i, n in enumerate(sizes)
    ]
    placer = make_placer("node-or-whole-nodes", Setting(NODES, policy.elastic))
    record = Simulation(jobs, {"m": PROFILE}, NODES, policy, placer=placer).run()
    return (~np.isnan(record.finish_s)).tolist()


@pytest.mark.parametrize(
    "name", ["fifo", "srtf", "srsf", "tiresias-l", "tiresias-g", "max-min", "themis", "optimus"]
)
def test_a_job_that_fits_nowhere_does_not_keep_the_others_waiting(name: str) -> None:
    assert finished(name, {}) == [False] + [True] * 10


def test_who_may_not_be_passed_keeps_them_waiting_and_the_run_still_ends() -> None:
    assert not any(finished("fifo", {"backfill": "no"}))
