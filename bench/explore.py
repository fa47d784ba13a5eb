"""Exploration in simulation: average completion time with learned profiles, relative to true ones.

    python bench/explore.py [--clusters 103959,2869ce,ed69ec] [--seeds 2]

Three Philly clusters on 64 GPUs (shared/data/afs), step times measured with 5 % noise. For each policy: the average
completion time with true profiles (seed 0: there is no noise), the change with learned ones and with learned ones and
exploration (mean of the seeds, and the worse of them), and the part of the GPU time that exploration took.
"""

from __future__ import annotations

import argparse

import numpy as np

from knowledge_data import DATA, print_json, require_data
from shoal.sim.known_profiles import Knowledge
from shoal.sim.runner import Setup, run

POLICIES = ("afs-l", "afs-p", "optimus")
GPUS = 64


def one(cluster: str, policy: str, knowledge: str, seed: int) -> tuple[float, float]:
    """Average completion time, and the part of the GPU time that exploration took."""
    folder = DATA / "afs"
    setup = Setup(
        folder / f"jobs-{cluster}.csv", folder / "profiles.csv", policy,
        gpus=GPUS, seed=seed, knowledge=Knowledge.parse(knowledge), timeline=False,
    )  # fmt: skip
    result = run(setup)
    submit_s = np.array([job.submit_s for job in result.inputs.jobs])
    spent = result.record.extra.get("exploration", {}).get("gpu_s", 0.0)
    return float(np.mean(result.record.finish_s - submit_s)), spent / float(result.record.gpu_s.sum())


def compare(cluster: str, policy: str, seeds: int) -> dict[str, float]:
    true_s, _ = one(cluster, policy, "true", 0)
    alone = [one(cluster, policy, "learned:0.05:0", seed)[0] / true_s - 1 for seed in range(seeds)]
    explored = [one(cluster, policy, "learned:0.05", seed) for seed in range(seeds)]
    return {
        "true_min": round(true_s / 60, 1),
        "learned_percent": round(100 * float(np.mean(alone)), 2),
        "explored_percent": round(100 * float(np.mean([s / true_s - 1 for s, _ in explored])), 2),
        "explored_worst_percent": round(100 * max(s / true_s - 1 for s, _ in explored), 2),
        "gpu_time_explored_percent": round(100 * float(np.mean([part for _, part in explored])), 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clusters", default="103959,2869ce,ed69ec")
    parser.add_argument("--seeds", type=int, default=2)
    given = parser.parse_args()
    require_data()
    print_json(
        {
            cluster: {policy: compare(cluster, policy, given.seeds) for policy in POLICIES}
            for cluster in given.clusters.split(",")
        }
    )


if __name__ == "__main__":
    main()
