"""How long one decision takes, and how that grows with jobs and GPUs. Prints JSON.

All forms but one are exact: afs-l is the left fold in order of submission, found eight jobs, blocks, groups at a time.
With few speed curves most GPUs need no fold, so all is measured with a curve of each job's own, too: measured at powers
of two, or smooth (known at every share), where AFS-P's holder changes all the time, or linear, where every GPU adds as
much as the first and jobs without a share compete with those that would double, or mixed, where a tenth of the jobs is
linear and the others hardly gain, the worst that is known for AFS-P: its holder goes through all of the linear ones.
`afs-p tie=gain` is the quick form, without a tournament; what that changes in completion times is told where the
published clusters are there (../shared/data). Each figure says its form. An exact form that has a quick one beside it
may take 50 ms where it does not reach its target.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from _figures import median_ms, medians_in_turns_ms, print_figures
from shoal.core.cluster import Cluster
from shoal.core.events import Submitted
from shoal.core.job import GpuRange, Job
from shoal.core.profile import Profile
from shoal.core.supply import Supply
from shoal.policies.base import Policy
from shoal.policies.registry import make_policy, policy_names
from shoal.scheduler.scheduler import Scheduler
from shoal.sim.inputs import read_profiles
from shoal.sim.runner import Setup, run
from shoal.sim.samples import sample_path

TARGET_MS = {"afs-l": 10.0, "optimus": 10.0}
#: Jobs and GPUs growing together, by a hundred times, and beyond.
TOGETHER = [(100, 1_000), (1_000, 10_000), (10_000, 100_000)]
BEYOND = (30_000, 300_000)
#: Costs per unit below this are the overhead of a call.
FLOOR_NS = 1.0
#: Curves of each job's own.
OWN = ("own", "smooth", "linear", "mixed")
#: AFS-P where the larger gain decides what lengths would: another rule, and quick whatever the curves.
BY_GAIN = "afs-p tie=gain"
#: What an exact form may take that has such a quick one beside it.
EXACT_MS = 50.0
PUBLISHED = Path(__file__).resolve().parents[2] / "shared" / "data" / "afs"
FAIR = ("gandiva-fair", "fair-afs")  # measured by bench/fair.py, on nodes and with many users


def curves(kind: str, jobs: int, rng: np.random.Generator) -> list[Profile]:
    """The `sample`'s, or as many as jobs: of their `own` bend, measured or `smooth`, `linear`, or `mixed`."""
    sample = list(read_profiles(sample_path("profiles.csv")).values())
    if kind == "sample":
        return sample
    longest = max(profile.curve("gpu").max_gpus for profile in sample)
    if kind == "linear":
        return [
            Profile.of(f"m{i}", {n: second / n for n in range(1, longest + 1)})
            for i, second in enumerate(rng.uniform(0.5, 2.0, jobs))
        ]
    if kind == "mixed":
        gains = np.where(rng.random(jobs) < 0.1, 1.0, rng.uniform(0.005, 0.01, jobs))
        return [
            Profile.of(f"m{i}", {n: second / (1 + gain * (n - 1)) for n in range(1, 2 * longest + 1)})
            for i, (second, gain) in enumerate(zip(rng.uniform(0.5, 2.0, jobs), gains))
        ]
    shares = range(1, longest + 1) if kind == "smooth" else [2**k for k in range(longest.bit_length())]
    return [
        Profile.of(f"m{i}", {n: 1 / n**power for n in shares})
        for i, power in enumerate(rng.uniform(0.6, 0.95, jobs))
    ]


def view_of(policy_name: str, jobs: int, gpus: int, kind: str, seed: int = 0) -> Scheduler:
    """A scheduler with all jobs active; from 1,000 jobs per 10,000 GPUs on they request more than there are."""
    cluster = Cluster.pool(gpus)
    rng = np.random.default_rng(seed)
    profiles = curves(kind, jobs, rng)
    scheduler = Scheduler(cluster, make(policy_name, seed))
    events = []
    for i in range(jobs):
        profile = profiles[rng.integers(len(profiles))] if kind == "sample" else profiles[i]
        longest = profile.curve("gpu").max_gpus
        want = int(min(2 ** rng.integers(0, 6), longest))
        work = float(rng.lognormal(9, 2))
        job = Job(f"j{i}", 0.0, GpuRange(1, longest), want, model=profile.model, iterations=work)
        events.append(Submitted(i, job, profile))
    scheduler.step(0.0, events)
    return scheduler


def decision(policy_name: str, jobs: int, gpus: int, kind: str = "sample") -> Callable[[], object]:
    """A call that decides for all jobs, each time a second later."""
    scheduler = view_of(policy_name, jobs, gpus, kind)
    supply, view, policy = Supply.of(scheduler.cluster), scheduler.view, scheduler.policy
    clock = count(1)
    return lambda: policy.decide(view, supply, float(next(clock)))


def make(name: str, seed: int = 0) -> Policy:
    """A policy by its name and, behind it, options."""
    name, *options = name.split()
    return make_policy(name, dict(option.split("=") for option in options), seed)


def form(name: str) -> str:
    return "quick" if name == BY_GAIN else "exact"


def deviation_by_gain() -> dict[str, float] | str:
    """Average completion times of afs-p by gain over those by coins, less 1, on the published clusters."""
    if not PUBLISHED.exists():
        return f"not measured: {PUBLISHED.name} is not beside the project"
    found = {}
    for jobs in sorted(PUBLISHED.glob("jobs-*.csv")):
        setup = Setup(jobs, PUBLISHED / "profiles.csv", "afs-p", gpus=64, whole_seconds=True)
        coins, gain = (run(replace(setup, options=o)).summary["avg_jct_s"] for o in ({}, {"tie": "gain"}))
        found[jobs.stem] = gain / coins - 1
    return found


def growth(names: list[str], kind: str) -> dict[str, Any]:
    """The curves, and the cost per (jobs + GPUs) x log2: a bound holds if this does not grow along the curves.

    A view of few jobs on many GPUs is decided in no time, so cost per unit is told over the whole grid: its
    largest value, and how it changes where jobs and GPUs grow together: by a hundred times, and by three more,
    which tells growth from what the nearest cache saves small views.
    """
    grid = sorted(
        {(n, 10_000) for n in (100, 300, 1_000, 3_000, 10_000)}
        | {(1_000, g) for g in (100, 1_000, 10_000, 100_000)}
        | {*TOGETHER, BEYOND}
    )
    rows = {}
    for name in names:
        ms = medians_in_turns_ms({at: decision(name, *at, kind) for at in grid})
        unit_ns = {at: 1e6 * t / (sum(at) * np.log2(sum(at))) for at, t in ms.items()}
        first, last, beyond = (max(unit_ns[at], FLOOR_NS) for at in (TOGETHER[0], TOGETHER[-1], BEYOND))
        worst = max(unit_ns, key=unit_ns.__getitem__)
        rows[name] = {
            "form": form(name),
            "ms": {f"{jobs} jobs, {gpus} GPUs": t for (jobs, gpus), t in ms.items()},
            "largest_ns_per_n_log_n": unit_ns[worst],
            "largest_at": f"{worst[0]} jobs, {worst[1]} GPUs",
            "growth_of_ns_per_n_log_n_together": last / first,
            "growth_of_ns_per_n_log_n_beyond": beyond / last,
        }
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="only the decision for 1,000 jobs on 10,000 GPUs"
    )
    quick = parser.parse_args().quick
    names = [*(n for n in policy_names() if n not in FAIR), BY_GAIN]
    at_scale = {
        name: {
            "ms": median_ms(decision(name, 1_000, 10_000)),
            **{f"ms_with_{kind}_curves": median_ms(decision(name, 1_000, 10_000, kind)) for kind in OWN},
            "target_ms": TARGET_MS.get(name, 5.0),
        }
        for name in names
    }
    for name, row in at_scale.items():
        slowest_ms = max(t for key, t in row.items() if key != "target_ms")
        row |= {"reached": slowest_ms <= row["target_ms"], "form": form(name)}
        if name == "afs-p":
            row["affordable"] = slowest_ms <= EXACT_MS
    figures = {"jobs": 1_000, "gpus": 10_000, "decision": at_scale}
    if not quick:
        figures |= {"afs_p_by_gain_deviation_of_avg_jct": deviation_by_gain()}
        figures |= {"growth": growth(names, "sample")}
        figures |= {f"growth_with_{kind}_curves": growth(names, kind) for kind in ("own", "smooth", "mixed")}
    print_figures(figures)


if __name__ == "__main__":
    main()
