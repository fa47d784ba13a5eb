"""Speed and fairness of fair sharing, as one JSON document.

    python bench/fair.py [claims] [milp] [quantum] [scale] [philly] [--data DIR] [--seed N] [--claims N]

claims: random claims on a few nodes for 12 hours under gandiva-fair. Of the feasible ones, in how many does every user
end within one quantum's work of its share? How long does a job wait at most?
milp: the same claims under the best set of gangs in every quantum, by an integer program. This takes long.

quantum: one decision for 1,000 jobs and for 10,000 jobs of 100 users on 10,000 GPUs.
scale: 100 users, 50,000 and 100,000 jobs on 1,000 GPUs that are overloaded by day. What do twice the jobs cost?
philly: clusters of the Philly trace with users by virtual cluster or by seed; fairness and average JCT of
gandiva-fair and fair-afs compared with afs-p.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.core.cluster import Cluster, Node, User
from shoal.core.job import GpuRange, Job
from shoal.core.ledger import Ledger
from shoal.core.profile import Profile
from shoal.core.supply import Supply
from shoal.core.view import View
from shoal.policies.registry import make_policy, policy_class
from shoal.sim.engine import Simulation
from shoal.sim.importers.convert import Wishes, convert
from shoal.sim.importers.philly_csv import read_philly_csv
from shoal.sim.inputs import read_jobs, read_profiles

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "fair"))
from claims import CLAIMS, MOST_NODES, MOST_TURNS, Claim, Found, gandiva_fair
from possible import Packings

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
    """Duration of a decision at the end of a quantum, and of one within a quantum."""
    rng = np.random.default_rng(0)
    owners = tuple(User(f"u{k}", float(rng.integers(1, 5))) for k in range(users))
    cluster = big_cluster(kind, owners)
    view = View(cluster.gpu_types, cluster.total_gpus, policy_class(policy).columns)
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


# -- how fair gandiva-fair is on nodes -----------------------------------------------------------------


def milp(seed: int, kind: str, hours: float) -> Found:
    """The same claim under the yardstick: the best set of gangs of every quantum, wherever they fit.

    An integer program finds, of the sets that leave no GPU idle on which a waiting gang fits, the one with the
    largest sum of GPUs times what their user is owed. Jobs migrate freely. Jobs that have waited for eight turns go
    first. Among alike jobs of a user the one that ran least goes first.
    """
    it = Claim(seed, kind)
    view, cluster = it.view, it.cluster
    user, size = view.user.tolist(), view.requested_gpus.tolist()
    make_policy("gandiva-fair").decide(view, Supply.of(cluster), 0.0)  # for the dues
    due = view.column("due_gpus").copy()
    share = np.bincount(view.user, weights=due, minlength=len(cluster.users))
    packings = Packings(Counter(zip(user, size)), len(cluster.nodes), cluster.nodes[0].gpus)
    owed, ran = np.zeros(len(share)), np.zeros(len(view))
    for quantum in range(round(hours * 3600.0 / it.quantum_s)):
        waited = np.where(view.gpus == 0, quantum - view.changed_s / it.quantum_s, 0.0)
        first = waited * due / view.requested_gpus > 8.0
        worth = [
            s * owed[u] + 1e4 * any(first[i] for i in range(len(user)) if (user[i], size[i]) == (u, s))
            for u, s in packings.kinds
        ]
        gpus = np.zeros(len(view), np.int32)
        for kind_of, count in zip(packings.kinds, packings.best(worth)):
            alike = [i for i in range(len(user)) if (user[i], size[i]) == kind_of]
            for i in sorted(alike, key=lambda i: (not first[i], ran[i]))[: int(count)]:
                gpus[i] = size[i]
                ran[i] += 1
        it.run_quantum(gpus, share)
        owed = -it.off * cluster.total_gpus
    return it.found()


def claims(
    first: int, count: int, hours: float = 12.0, rule: Callable[[int, str, float], Found] = gandiva_fair
) -> dict[str, Any]:
    """Of the feasible claims: in how many does every user end within one quantum's work of its share?"""
    out: dict[str, Any] = {}
    for kind in CLAIMS:
        if rule is milp and min(CLAIMS[kind][0]) > MOST_NODES:
            continue
        began_s = time.perf_counter()
        found = [rule(seed, kind, hours) for seed in range(first, first + count)]
        feasible = [f for f in found if f.end_off <= 1.0 or f.feasible]
        out[kind] = {
            "claims": count,
            "hours": hours,
            "feasible": len(feasible),
            "end_within_one_quantum": sum(f.end_off <= 1.0 for f in feasible),
            "always_within_one_quantum": sum(f.ever_off <= 1.0 for f in feasible),
            "end_off_quanta_median": float(np.median([f.end_off for f in found])),
            "starved": sum(f.turns > MOST_TURNS for f in found),
            "longest_wait_turns": max(f.turns for f in found),
            "gpu_time_used": float(np.mean([f.used for f in found])),
            "migrations_per_hour": float(np.mean([f.migrations for f in found]) / hours),
            "wall_s": time.perf_counter() - began_s,
            "further_off": [asdict(f) for f in found if f.end_off > 1.0],
        }
        print(json.dumps({kind: out[kind]}), file=sys.stderr, flush=True)
    met, of = (sum(o[k] for o in out.values()) for k in ("end_within_one_quantum", "feasible"))
    return {**out, "all": {"feasible": of, "end_within_one_quantum": met, "part": met / max(of, 1)}}


# -- a hundred users -------------------------------------------------------------------------------


def crowd(jobs: int, elastic: bool, seed: int = 1) -> tuple[list[Job], Cluster]:
    """100 users on 1,000 GPUs: a load of 90 % on average that rises to 135 % by day, so that many wait."""
    rng = np.random.default_rng(seed)
    users = tuple(User(f"u{k}", float(rng.integers(1, 4))) for k in range(100))
    sizes = rng.choice([1, 2, 4, 8, 16], jobs, p=[0.6, 0.15, 0.15, 0.07, 0.03])
    work_s = np.minimum(rng.lognormal(7.5, 1.6, jobs), 3 * 86400)
    rate = 0.9 * 1000 / float((sizes * work_s).mean())
    at_s = _by_day(np.cumsum(rng.exponential(1 / rate, jobs)))
    owner = rng.zipf(1.5, jobs) % 100
    trace = [
        Job(
            f"j{i}",
            float(at_s[i]),
            GpuRange(1, 16) if elastic else GpuRange(int(g), int(g)),
            int(g),
            user=f"u{owner[i]}",
            model="linear",
            iterations=float(work_s[i] * LINEAR.curve("gpu").speed[g]),
        )
        for i, g in enumerate(sizes.tolist())
    ]
    return trace, Cluster.pool(1000, users=users)


def _by_day(even_s: NDArray[np.float64]) -> NDArray[np.float64]:
    """Even arrivals moved so that their rate goes as 1 + sin(2 pi t / day) / 2."""
    clock_s = np.arange(0.0, even_s[-1] + 2 * 86400, 60.0)
    done = clock_s + 86400 / (4 * np.pi) * (1 - np.cos(2 * np.pi * clock_s / 86400))
    return np.interp(even_s, done, clock_s)


def scale(policy: str, jobs: int, options: dict[str, str]) -> dict[str, Any]:
    """One run of the crowd, with its CPU time and the peak memory of this process."""
    trace, cluster = crowd(jobs, elastic=policy != "gandiva-fair")
    began_s = time.process_time()
    result = simulate(trace, {"linear": LINEAR}, cluster, policy, options)
    cpu_s = time.process_time() - began_s
    return {
        "jobs": jobs,
        **result,
        "cpu_s": cpu_s,
        "cpu_us_per_decision": 1e6 * cpu_s / result["decisions"],
        "peak_memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def scale_apart(policy: str, options: dict[str, str], sizes: Sequence[int]) -> list[dict[str, Any]]:
    """Each size in a process of its own, for its memory; the ratio of CPU time to the size before."""
    rows: list[dict[str, Any]] = []
    for jobs in sizes:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as apart:
            rows.append(apart.submit(scale, policy, jobs, options).result())
        if len(rows) > 1:
            rows[-1]["cpu_to_size_before"] = rows[-1]["cpu_s"] / rows[-2]["cpu_s"]
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    return rows


SCALED: tuple[tuple[str, dict[str, str]], ...] = (("afs-p", {}), ("gandiva-fair", {}), ("fair-afs", {}))


# -- the Philly trace ------------------------------------------------------------------------------


def simulate(
    jobs: Sequence[Job],
    profiles: dict[str, Profile],
    cluster: Cluster,
    policy: str,
    options: dict[str, str] | None = None,
) -> dict[str, Any]:
    """One run: average JCT, and how far users were from what they were entitled to."""
    simulation = Simulation(jobs, profiles, cluster, make_policy(policy, options), timeline=False)
    began = time.perf_counter()
    record = simulation.run()
    wall_s = time.perf_counter() - began
    ledger = simulation.ledger
    assert ledger is not None
    jct = record.finish_s - np.array([job.submit_s for job in jobs])
    return {
        "policy": policy,
        "options": options or {},
        "finished": int(np.isfinite(jct).sum()),
        "avg_jct_min": float(np.nanmean(jct) / 60),
        "p50_jct_min": float(np.nanmedian(jct) / 60),
        "changes_per_job": float(record.changes.mean()),
        "largest_deviation_pct": 100 * ledger.worst_deviation(),
        "largest_deviation_in_a_day_pct": 100 * ledger.worst_deviation(window_s=86400),
        "mean_shortfall_in_a_day_pct": 100 * shortfall(ledger),
        "decisions": record.decisions,
        "wall_s": wall_s,
    }


def shortfall(ledger: Ledger, window_s: float = 86400.0) -> float:
    """Of all GPU time users were entitled to, day by day, the part that they did not get."""
    series = ledger.over_time()
    times = np.array(series["time_s"])
    step = max(round(window_s / (times[1] - times[0])), 1)
    lost = total = 0.0
    for user in ledger.users:
        due, had = (np.array(series["gpus"][user][c]) for c in ("entitled", "received"))
        edges = np.arange(0, len(times), step)
        due, had = np.add.reduceat(due, edges), np.add.reduceat(had, edges)
        lost += float(np.maximum(due - had, 0).sum())
        total += float(due.sum())
    return lost / total if total else 0.0


POLICIES: tuple[tuple[str, dict[str, str]], ...] = (
    ("afs-p", {}),
    # Two months in quanta of a minute take minutes to simulate; ten of them change little over months.
    ("gandiva-fair", {"quantum_s": "600"}),
    ("fair-afs", {}),
    ("fair-afs", {"inside": "afs-l"}),
    ("fair-afs", {"slack": "0.2", "correct_s": "86400", "credit_s": "604800"}),
)


def compare(jobs: Sequence[Job], profiles: dict[str, Profile], cluster: Cluster) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for policy, options in POLICIES:
        rows.append(simulate(jobs, profiles, cluster, policy, options))
        rows[-1]["jct_to_afs_p"] = rows[-1]["avg_jct_min"] / rows[0]["avg_jct_min"]
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    return rows


def philly(data: Path, seed: int = 0) -> dict[str, Any]:
    """Users by seed in three clusters of 64 GPUs, and by virtual cluster in seven of them put together."""
    profiles = read_profiles(data / "afs" / "profiles.csv")
    out: dict[str, Any] = {}
    rng = np.random.default_rng(seed)
    for name in ("2869ce", "ed69ec", "103959"):
        cluster = Cluster.pool(64, users=[User(f"u{k}") for k in range(8)])
        jobs = read_jobs(data / "afs" / f"jobs-{name}.csv", profiles, cluster.with_users([User("default")]))
        owned = [replace(job, user=f"u{rng.integers(8)}") for job in jobs]
        out[f"{name}, 64 GPUs, 8 users by seed"] = compare(owned, profiles, cluster)
    clusters = ("0e4a51", "103959", "2869ce", "7f04ca", "e13805", "ed69ec", "ee9e8c")
    table = convert(read_philly_csv(data / "philly" / "philly.csv"), profiles, Wishes(vcs=clusters)).jobs
    jobs = [
        Job(
            f"j{i}",
            row["submit_s"],
            GpuRange(1, profiles[row["model"]].curve("gpu").max_gpus),
            row["requested_gpus"],
            user=row["user"],
            model=row["model"],
            iterations=row["iterations"],
        )
        for i, row in enumerate(table.iter_rows(named=True))
    ]
    for gpus in (256, 512):
        whole = Cluster.pool(gpus, users=[User(name) for name in clusters])
        out[f"7 virtual clusters as users, {gpus} GPUs"] = compare(jobs, profiles, whole)
    return out


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("parts", nargs="*", default=["claims", "quantum", "scale", "philly"])
    default = Path(__file__).resolve().parents[2] / "shared" / "data"
    parser.add_argument("--data", type=Path, default=default, help="directory of the Philly trace")
    parser.add_argument("--jobs", type=int, default=100_000, help="jobs of the larger run of `scale`")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first random claim")
    parser.add_argument("--claims", type=int, default=100, help="random claims of each kind")
    args = parser.parse_args(argv)
    parts: dict[str, Callable[[], Any]] = {
        "claims": lambda: claims(args.seed, args.claims),
        "milp": lambda: claims(args.seed, args.claims, rule=milp),
        "quantum": lambda: [
            quantum(policy, kind, jobs)
            for policy in ("gandiva-fair", "fair-afs")
            for kind in ("pool", "nodes", "mixed")
            for jobs in (1_000, 10_000)
        ],
        "scale": lambda: [
            row
            for policy, options in SCALED
            for row in scale_apart(policy, options, [args.jobs // 2, args.jobs])
        ],
        "philly": lambda: philly(args.data),
    }
    print(json.dumps({part: parts[part]() for part in args.parts}, indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
