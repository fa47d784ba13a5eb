"""How long simulations take. Prints JSON.

    python bench/simulator.py                 all of it (about 15 minutes)
    python bench/simulator.py philly afs      some of it: philly, afs, large
    python bench/simulator.py large:afs-l,afs-p      some of it, for some policies

philly: 10,000 Philly jobs on 640 GPUs, and a bare heap loop over the same jobs as a lower bound.
afs: 10,000 jobs on 64 GPUs under afs-l. large: 100,000 Philly-like jobs on 2,490 GPUs at load 0.9, under every
policy. Philly comes from ../shared/data if it is there; otherwise a generated trace of the same shape replaces it.
The figures say which.
"""

from __future__ import annotations

import argparse
import csv
import heapq
import multiprocessing
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from _figures import cpu_and_wall, print_figures
from shoal.core.cluster import Cluster
from shoal.core.job import GpuRange, Job
from shoal.core.profile import Profile
from shoal.policies.registry import make_policy, policy_names
from shoal.sim.engine import Simulation
from shoal.sim.generate import Recipe, generate
from shoal.sim.inputs import read_profiles
from shoal.sim.samples import sample_path

PHILLY = Path(__file__).resolve().parents[2] / "shared" / "data" / "philly" / "philly.csv"
FAIR = ("gandiva-fair", "fair-afs")  # measured by bench/fair.py


def generated(count: int, gpus: int, load: float, seed: int = 0) -> tuple[list[Job], dict[str, Profile]]:
    """A trace of Philly's shape at a load, with the sample's models."""
    profiles = read_profiles(sample_path("profiles.csv"))
    frame = generate(Recipe(jobs=count, gpus=gpus, load=load), profiles, np.random.default_rng(seed))
    jobs = [
        Job(f"j{i}", at, GpuRange(1, most), want, model=model, iterations=work)
        for i, (at, model, work, want, most) in enumerate(
            zip(
                *(
                    frame[c].to_list()
                    for c in ("submit_s", "model", "iterations", "requested_gpus", "max_gpus")
                )
            )
        )
    ]
    return jobs, profiles


def philly(count: int) -> tuple[list[Job], dict[str, Profile], str]:
    """Jobs 20,000.. of the time-sorted trace, of 60 s and more, 1 to 64 GPUs, at their own size."""
    if not PHILLY.exists():
        jobs, profiles = generated(count, 640, 0.5)
        return jobs, profiles, "generated"
    with PHILLY.open() as file:
        rows = sorted(
            (
                int(np.datetime64(r["timestamp"]).astype("datetime64[s]").astype(int)),
                float(r["duration"]),
                int(r["num_gpus"]),
            )
            for r in csv.DictReader(file)
        )
    rows = [r for r in rows if r[1] >= 60 and 1 <= r[2] <= 64][20_000 : 20_000 + count]
    jobs = [
        Job(f"j{i}", float(at - rows[0][0]), GpuRange(g, g), g, model=str(g), iterations=duration)
        for i, (at, duration, g) in enumerate(rows)
    ]
    return jobs, {str(g): Profile.of(str(g), {g: 1.0}) for g in {r[2] for r in rows}}, "philly"


def run(policy: str, jobs: list[Job], profiles: dict[str, Profile], gpus: int) -> dict[str, Any]:
    Simulation(jobs[:100], profiles, Cluster.pool(64), make_policy(policy)).run()  # compile
    simulation = Simulation(jobs, profiles, Cluster.pool(gpus), make_policy(policy))
    record, cpu_s, wall_s = cpu_and_wall(simulation.run)
    return {
        "cpu_s": cpu_s,
        "wall_s": wall_s,
        "avg_jct_s": float(np.mean(record.finish_s - [j.submit_s for j in jobs])),
        "decisions": record.decisions,
        "active": float(np.mean(record.active)),
        "contended_decisions": int(np.sum(np.array(record.used) >= gpus)),
    }


def bare_heap(jobs: list[Job], gpus: int) -> float:
    """A lower bound: strict FIFO that only counts GPUs, in plain Python."""
    ends: list[tuple[float, int]] = []
    free, now, total = gpus, 0.0, 0.0
    for job in jobs:
        now = max(now, job.submit_s)
        while ends and ends[0][0] <= now:
            free += heapq.heappop(ends)[1]
        while free < job.requested_gpus:
            now, back = heapq.heappop(ends)
            free += back
        free -= job.requested_gpus
        heapq.heappush(ends, (now + (job.iterations or 0), job.requested_gpus))
        total += now + (job.iterations or 0) - job.submit_s
    return total / len(jobs)


def bench_philly(_: list[str]) -> dict[str, Any]:
    jobs, profiles, source = philly(10_000)
    floor_jct, floor, _ = cpu_and_wall(lambda: bare_heap(jobs, 640))
    rows = {p: run(p, jobs, profiles, 640) for p in ("fifo", "srtf", "srsf", "tiresias-l", "themis")}
    for row in rows.values():
        row["times_the_bare_loop"] = row["cpu_s"] / floor
    return {
        "source": source,
        "target_s": 2.0,
        "bare_heap_loop": {"cpu_s": floor, "avg_jct_s": floor_jct},
        **rows,
    }


def bench_afs(_: list[str]) -> dict[str, Any]:
    jobs, profiles = generated(10_000, 64, 0.9)
    row = run("afs-l", jobs, profiles, 64)
    return {"target_s": 1.5, "afs-l": {**row, "jobs_per_s": 10_000 / row["cpu_s"]}}


def large(policy: str, count: int) -> dict[str, Any]:
    row = run(policy, *generated(count, 2_490, 0.9), 2_490)
    return {**row, "peak_memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}


def in_own_process(function: Callable[..., dict[str, Any]], *args: Any) -> dict[str, Any]:
    """In a process of its own, so that peak memory is that of the run."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        row = pool.apply(function, args)
    print(f"{function.__name__} {' '.join(map(str, args))}: {row['cpu_s']:.1f} s", file=sys.stderr)
    return row


def bench_large(names: list[str]) -> dict[str, Any]:
    return {
        "target_s": 60.0,
        "target_mb": 2_000,
        **{name: in_own_process(large, name, 100_000) for name in names},
    }


PARTS = {"philly": bench_philly, "afs": bench_afs, "large": bench_large}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", default=list(PARTS), help="PART or PART:POLICY,POLICY")
    figures: dict[str, Any] = {}
    for word in parser.parse_args().parts:
        part, _, names = word.partition(":")
        if part not in PARTS:
            parser.error(f"no part {part!r}; there are {', '.join(PARTS)}")
        policies = names.split(",") if names else [n for n in policy_names() if n not in FAIR]
        figures[part] = PARTS[part](policies)
    print_figures(figures)


if __name__ == "__main__":
    main()
