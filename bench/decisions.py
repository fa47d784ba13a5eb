"""How long one decision takes, and how that grows with jobs and GPUs. Prints JSON.

All forms are exact: afs-l is the left fold in order of submission, found by a tree.
"""

from __future__ import annotations

import argparse

import numpy as np

from _figures import median_ms, print_figures
from shoal.core.cluster import Cluster
from shoal.core.events import Submitted
from shoal.core.job import GpuRange, Job
from shoal.policies.base import Supply
from shoal.policies.registry import make_policy, policy_names
from shoal.scheduler.scheduler import Scheduler
from shoal.sim.inputs import read_profiles
from shoal.sim.samples import sample_path

TARGET_MS = {"afs-l": 10.0, "optimus": 10.0}
FAIR = ("gandiva-fair", "fair-afs")  # measured by bench/fair.py, on nodes and with many users


def view_of(policy_name: str, jobs: int, gpus: int, seed: int = 0) -> Scheduler:
    """A scheduler in the midst of its work: all jobs active, half of the work done."""
    profiles = list(read_profiles(sample_path("profiles.csv")).values())
    cluster = Cluster.pool(gpus)
    rng = np.random.default_rng(seed)
    scheduler = Scheduler(cluster, make_policy(policy_name, seed=seed))
    events = []
    for i in range(jobs):
        profile = profiles[rng.integers(len(profiles))]
        longest = profile.curve("gpu").max_gpus
        want = int(min(2 ** rng.integers(0, 5), longest))
        work = float(rng.lognormal(9, 2))
        job = Job(f"j{i}", 0.0, GpuRange(1, longest), want, model=profile.model, iterations=work)
        events.append(Submitted(i, job, profile))
    scheduler.step(0.0, events)
    return scheduler


def decision_ms(policy_name: str, jobs: int, gpus: int, repeat: int = 15) -> float:
    scheduler = view_of(policy_name, jobs, gpus)
    supply, view, policy = Supply.of(scheduler.cluster), scheduler.view, scheduler.policy
    clock = iter(range(1, 10_000))
    return median_ms(lambda: policy.decide(view, supply, float(next(clock))), repeat)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="only the decision for 1,000 jobs on 10,000 GPUs"
    )
    quick = parser.parse_args().quick
    names = [n for n in policy_names() if n not in FAIR]
    at_scale = {
        name: {"ms": decision_ms(name, 1_000, 10_000), "target_ms": TARGET_MS.get(name, 5.0)}
        for name in names
    }
    for row in at_scale.values():
        row["reached"] = row["ms"] <= row["target_ms"]
    figures = {"jobs": 1_000, "gpus": 10_000, "form": "exact", "decision": at_scale}
    if not quick:
        jobs_curve = {
            name: {n: decision_ms(name, n, 10_000, 5) for n in (100, 300, 1_000, 3_000, 10_000)}
            for name in names
        }
        gpus_curve = {
            name: {g: decision_ms(name, 1_000, g, 5) for g in (100, 1_000, 10_000, 100_000)} for name in names
        }
        figures["ms_by_jobs_on_10000_gpus"] = jobs_curve
        figures["ms_by_gpus_with_1000_jobs"] = gpus_curve

        def growth(curve: dict[int, float], fixed: int) -> float:
            """Time growth over the growth of (jobs + GPUs) x log, first to last; at most about 1 is linear."""
            sizes = list(curve)
            first, last = sizes[0] + fixed, sizes[-1] + fixed
            return (curve[sizes[-1]] / curve[sizes[0]]) / (last * np.log(last) / (first * np.log(first)))

        figures["growth_over_n_log_n"] = {
            name: {"in_jobs": growth(jobs_curve[name], 10_000), "in_gpus": growth(gpus_curve[name], 1_000)}
            for name in names
        }
    print_figures(figures)


if __name__ == "__main__":
    main()
