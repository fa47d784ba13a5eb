"""Speed and fairness of fair sharing, as one JSON document.

    python bench/fair.py [claims] [quantum] [scale] [philly] [--data DIR] [--seed N]

claims: random claims on a few nodes, 12 hours of quanta: how far is a user ever off its part, and how long does
a job ever wait? Of claims where that is more than a quantum's work: which fraction of their parts could all users
have at once (tests/fair/possible.py), and how far is a user ever short of that?

quantum: one decision for 10,000 jobs of 100 users on 10,000 GPUs (the aim is 50 ms).
scale: 100 users, 50,000 and 100,000 jobs on 1,000 GPUs that are too few by day: what do twice the jobs cost?
philly: clusters of the Philly trace with users by virtual cluster or by seed; fairness and average JCT of
gandiva-fair and fair-afs against afs-p.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
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
from shoal.core.water_filling import water_fill
from shoal.policies.registry import make_policy, policy_class
from shoal.sim.engine import Simulation
from shoal.sim.importers.convert import Wishes, convert
from shoal.sim.importers.philly_csv import read_philly_csv
from shoal.sim.inputs import read_jobs, read_profiles

LINEAR = Profile.of("linear", {g: g**-0.9 for g in (1, 2, 4, 8, 16)})
MIXED = Profile.from_rows(
    "mixed",
    [(t, g, 0, g**-0.9 / v) for t, v in (("k80", 1), ("p100", 3), ("v100", 5)) for g in (1, 2, 4, 8, 16)],
)


ANY = Profile.of("any", {g: 1.0 / g for g in range(1, 17)})


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


CLAIMS = {
    "4 nodes of 4, 18 to 39 jobs of 1, 2 or 4": ((4,), (4,), (1, 2, 4), (18, 40), 4),
    "2 to 6 nodes of 4 or 8, gangs of 1, 2, 4, .. within a node": (
        (2, 3, 4, 6),
        (4, 8),
        (1, 2, 4, 8),
        (6, 30),
        6,
    ),
    "the same, gangs of any size within a node": ((2, 3, 4, 6), (4, 8), tuple(range(1, 9)), (6, 30), 6),
    "the same, gangs of 1, 2, 4, 8, 12 or 16, that may span nodes": (
        (2, 3, 4, 6),
        (4, 8),
        (1, 2, 4, 8, 12, 16),
        (6, 30),
        6,
    ),
    "24 or 32 nodes of 4 or 8, 100 to 299 jobs of the same gangs": (
        (24, 32),
        (4, 8),
        (1, 2, 4, 8, 12, 16),
        (100, 300),
        12,
    ),
}
#: On more nodes than these the linear program takes too long.
MOST_NODES = 8


@dataclass(frozen=True, slots=True)
class Found:
    """What became of a claim; distances in quanta of all GPUs."""

    seed: int
    #: The furthest any user was off its part of what was given out, and the longest wait, in turns.
    off: float
    turns: float
    migrations: int
    #: Where that is too far: the fraction of their parts that all could have, and how far a user was short of it
    #: (none: not known, on many nodes).
    possible: float | None
    short: float | None


def claim(seed: int, kind: str, hours: float) -> Found:
    counts, widths, sizes, jobs, most_users = CLAIMS[kind]
    rng = np.random.default_rng(seed)
    gpus, users = int(rng.choice(widths)), int(rng.integers(2, most_users + 1))
    owners = tuple(User(f"u{k}", float(rng.integers(1, 4))) for k in range(users))
    cluster = Cluster.of(int(rng.choice(counts)), gpus).with_users(owners)
    view = View(cluster.gpu_types, cluster.total_gpus, policy_class("gandiva-fair").columns)
    fitting = [s for s in sizes if s <= (cluster.total_gpus if max(sizes) > max(widths) else gpus)]
    for i in range(int(rng.integers(*jobs))):
        size = int(rng.choice(fitting))
        job = Job(f"j{i}", 0.0, GpuRange(size, size), size, iterations=1e9)
        view.add(i, job, ANY, int(rng.integers(users)), 0.0)
    decider, supply, quantum_s = make_policy("gandiva-fair"), Supply.of(cluster), 60.0
    had, off, turns, so_far = np.zeros(users), 0.0, 0.0, []
    for now_s in np.arange(0.0, hours * 3600.0, quantum_s).tolist():
        decision = decider.decide(view, supply, now_s)
        view.changed_s[decision.gpus != view.gpus] = now_s
        view.first_start_s[decision.gpus > 0] = np.minimum(view.first_start_s[decision.gpus > 0], now_s)
        view.gpus[:] = decision.gpus
        view.gpu_type[:] = np.where(decision.gpus > 0, 0, -1)
        np.add.at(had, view.user, view.gpus / cluster.total_gpus)
        so_far.append(had.copy())
        part = decider.entitled().sum(axis=1)
        off = max(off, float(np.abs(had - part / part.sum() * had.sum()).max()))
        waited_s = np.where(view.gpus == 0, now_s + quantum_s - view.changed_s, 0.0)
        turns = max(
            turns, float((waited_s * view.column("due_gpus") / (view.requested_gpus * quantum_s)).max())
        )
    possible, short = (1.0, 0.0) if off <= 1.0 else (None, None)
    if off > 1.0 and len(cluster.nodes) <= MOST_NODES:
        claimed = list(zip(view.user.tolist(), view.requested_gpus.tolist()))
        possible = possible_fraction(claimed, cluster, part)
        due = possible * part / cluster.total_gpus * np.arange(1, len(so_far) + 1)[:, None]
        short = float((due - np.array(so_far)).max())
    return Found(seed, off, turns, decider.binding.migrations, possible, short)


def possible_fraction(jobs: list[tuple[int, int]], cluster: Cluster, part: NDArray[np.float64]) -> float:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "fair"))
    from possible import fraction_for_all  # beside the tests that use it; with no turn longer than nine

    due = {u: [s for v, s in jobs if v == u] for u, _ in jobs}
    rate = {u: water_fill([1.0] * len(s), [float(x) for x in s], float(part[u])) for u, s in due.items()}
    floor = {(u, size): rate[u][due[u].index(size)] / size / 9 for u, size in jobs}
    gpus = cluster.nodes[0].gpus
    return fraction_for_all(jobs, len(cluster.nodes), gpus, part, lambda u, size: floor[u, size])


def claims(first: int, count: int = 100, hours: float = 12.0) -> dict[str, Any]:
    out = {}
    for kind in CLAIMS:
        found = [claim(seed, kind, hours) for seed in range(first, first + count)]
        off, turns = [f.off for f in found], [f.turns for f in found]
        out[kind] = {
            "claims": count,
            "hours": hours,
            "within_one_quantum": sum(x <= 1.0 for x in off),
            "furthest_off_quanta": {"median": float(np.median(off)), "worst": max(off)},
            "longest_wait_turns": {"median": float(np.median(turns)), "worst": max(turns)},
            "migrations": float(np.mean([f.migrations for f in found])),
            "further_off": [asdict(f) for f in found if f.off > 1.0],
        }
        print(json.dumps({kind: out[kind]}), file=sys.stderr, flush=True)
    return out


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
    parser.add_argument("--data", type=Path, default=default, help="where the Philly trace is")
    parser.add_argument("--jobs", type=int, default=100_000, help="of the larger run of `scale`")
    parser.add_argument("--seed", type=int, default=0, help="of the first of the random claims")
    args = parser.parse_args(argv)
    parts: dict[str, Callable[[], Any]] = {
        "claims": lambda: claims(args.seed),
        "quantum": lambda: [
            quantum(policy, kind)
            for policy in ("gandiva-fair", "fair-afs")
            for kind in ("pool", "nodes", "mixed")
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
