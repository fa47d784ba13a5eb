"""Speed and fairness of fair sharing, as one JSON document.

    python bench/fair.py [quantum] [scale] [philly] [--data DIR]

quantum: one decision for 10,000 jobs of 100 users on 10,000 GPUs (the aim is 50 ms).
scale: 100 users, 100,000 jobs, and a tenth of it on the same cluster: what does each job cost?
philly: clusters of the Philly trace with users by virtual cluster or by seed; fairness and average JCT of
gandiva-fair and fair-afs against afs-p.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from shoal.core.cluster import Cluster, Node, User
from shoal.core.job import GpuRange, Job
from shoal.core.profile import Profile
from shoal.core.view import View
from shoal.policies.base import Supply
from shoal.policies.registry import make_policy

LINEAR = Profile.of("linear", {g: g**-0.9 for g in (1, 2, 4, 8, 16)})
MIXED = Profile.from_rows(
    "mixed",
    [(t, g, 0, g**-0.9 / v) for t, v in (("k80", 1), ("p100", 3), ("v100", 5)) for g in (1, 2, 4, 8, 16)],
)


def big_cluster(kind: str, users: tuple[User, ...], gpus: int = 10_000) -> Cluster:
    if kind == "pool":
        return Cluster.pool(gpus, users=users)
    if kind == "nodes":
        return Cluster.of(gpus // 8, 8).with_users(users)
    types = ("k80", "p100", "v100")
    return Cluster(tuple(Node(f"n{i}", 8, types[i % 3]) for i in range(gpus // 8)), users)


def quantum(policy: str, kind: str, jobs: int = 10_000, users: int = 100, rounds: int = 30) -> dict[str, Any]:
    """Time of a decision at the end of a quantum, and of one within it."""
    rng = np.random.default_rng(0)
    owners = tuple(User(f"u{k}", float(rng.integers(1, 5))) for k in range(users))
    cluster = big_cluster(kind, owners)
    view = View(cluster.gpu_types, cluster.total_gpus)
    for i in range(jobs):
        gpus = int(rng.choice([1, 2, 4, 8, 16], p=[0.5, 0.2, 0.15, 0.1, 0.05]))
        elastic = policy == "fair-afs" and rng.random() < 0.7
        job = Job(f"j{i}", 0.0, GpuRange(1, 16) if elastic else GpuRange(gpus, gpus), gpus, iterations=1e6)
        view.add(i, job, MIXED if kind == "mixed" else LINEAR, int(rng.integers(users)), 0.0)
    decider, supply, now_s = make_policy(policy), Supply.of(cluster), 0.0
    ends, betweens = [], []
    for _ in range(rounds):
        for times in (ends, betweens):
            began = time.perf_counter()
            decision = decider.decide(view, supply, now_s)
            times.append(1000 * (time.perf_counter() - began))
            view.gpus[:] = decision.gpus
            view.gpu_type[:] = (
                np.where(decision.gpus > 0, decision.gpu_type, -1) if decision.gpu_type is not None else 0
            )
            now_s += 1.0
        now_s = decision.wake_s if np.isfinite(decision.wake_s) else now_s + 60.0
    return {
        "policy": policy,
        "cluster": kind,
        "jobs": jobs,
        "users": users,
        "gpus": cluster.total_gpus,
        "demand_gpus": int(view.requested_gpus.sum()),
        "end_of_quantum_ms": _spread(ends[2:]),
        "within_quantum_ms": _spread(betweens[2:]),
    }


def _spread(times: list[float]) -> dict[str, float]:
    return {"median": round(float(np.median(times)), 3), "worst": round(max(times), 3)}


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", default=["quantum"])
    args = parser.parse_args(argv)
    parts: dict[str, Callable[[], Any]] = {
        "quantum": lambda: [quantum("gandiva-fair", k) for k in ("pool", "nodes", "mixed")],
    }
    print(json.dumps({part: parts[part]() for part in args.parts}, indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
