"""How long one decision takes for 1,000 jobs on 10,000 GPUs. Prints JSON.

The targets hold for the speed curves of the sample, which many jobs share. The figures with a curve for each job, known
at every GPU count, show what a decision costs if no two jobs are alike; they have no target. The last figures compare
the two tie-breaks of AFS-P on the published clusters, if ../shared/data is there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from _figures import median_ms, print_figures
from shoal.core.cluster import Cluster
from shoal.core.events import Submitted
from shoal.core.job import GpuRange, Job
from shoal.core.profile import Profile
from shoal.core.supply import Supply
from shoal.policies.registry import make_policy, policy_names
from shoal.scheduler.scheduler import Scheduler
from shoal.sim.inputs import read_profiles
from shoal.sim.runner import Setup, run
from shoal.sim.samples import sample_path

JOBS, GPUS = 1_000, 10_000
TARGET_MS = {"afs-l": 10.0, "afs-p": 10.0}
OTHERS_MS = 5.0
FAIR = ("gandiva-fair", "fair-afs")  # measured by bench/fair.py, on nodes and with many users
PUBLISHED = Path(__file__).resolve().parents[2] / "shared" / "data" / "afs"


def curves(own: bool, rng: np.random.Generator) -> list[Profile]:
    """The speed curves of the sample, or a power law for each job."""
    sample = list(read_profiles(sample_path("profiles.csv")).values())
    if not own:
        return sample
    longest = max(profile.curve("gpu").max_gpus for profile in sample)
    return [
        Profile.of(f"m{i}", {n: n**-power for n in range(1, longest + 1)})
        for i, power in enumerate(rng.uniform(0.6, 0.95, JOBS))
    ]


def scheduler_of(policy: str, options: dict[str, str], own_curves: bool, step: int = 1) -> Scheduler:
    """A scheduler with all jobs, which request more GPUs than there are. Every second one has this step."""
    rng = np.random.default_rng(0)
    profiles = curves(own_curves, rng)
    scheduler = Scheduler(Cluster.pool(GPUS), make_policy(policy, options))
    events = []
    for i in range(JOBS):
        profile = profiles[i] if own_curves else profiles[rng.integers(len(profiles))]
        longest = profile.curve("gpu").max_gpus
        want = int(min(2 ** rng.integers(0, 6), longest))
        work = float(rng.lognormal(9, 2))
        gpus = GpuRange(1, longest)
        if i % 2 and longest >= step > 1:
            gpus = GpuRange(step, longest - longest % step, step)
            want = max(want - want % step, step)
        job = Job(f"j{i}", 0.0, gpus, want, model=profile.model, iterations=work)
        events.append(Submitted(i, job, profile))
    scheduler.step(0.0, events)
    return scheduler


def decision(policy: str, options: dict[str, str], own_curves: bool) -> Callable[[], object]:
    """A call that decides for all jobs, each time a second later."""
    scheduler = scheduler_of(policy, options, own_curves)
    supply, clock = Supply.of(scheduler.cluster), count(1)
    return lambda: scheduler.policy.decide(scheduler.view, supply, float(next(clock)))


def measured(policy: str, options: dict[str, str]) -> dict[str, Any]:
    target_ms = TARGET_MS.get(policy, OTHERS_MS)
    ms = median_ms(decision(policy, options, own_curves=False))
    own_ms = median_ms(decision(policy, options, own_curves=True))
    return {"ms": ms, "target_ms": target_ms, "reached": ms <= target_ms, "ms_with_own_curves": own_ms}


def whole_step(step: int) -> Callable[[], object]:
    """A call of the scheduler's whole cycle, under max-min."""
    scheduler, clock = scheduler_of("max-min", {}, own_curves=False, step=step), count(1)
    return lambda: scheduler.step(float(next(clock)), [])


def gain_against_coin() -> dict[str, Any] | str:
    """Average completion time and share changes of afs-p with tie=gain, relative to tie=coin."""
    if not PUBLISHED.exists():
        return "not measured: the published clusters are not there"
    found = {}
    for jobs in sorted(PUBLISHED.glob("jobs-*.csv")):
        setup = Setup(jobs, PUBLISHED / "profiles.csv", "afs-p", gpus=64, whole_seconds=True)
        coin, gain = (run(replace(setup, options={"tie": tie})).summary for tie in ("coin", "gain"))
        found[jobs.stem] = {key: gain[key] / coin[key] for key in ("avg_jct_s", "share_changes_per_job")}
    return found


def main() -> None:
    figures = {name: measured(name, {}) for name in policy_names() if name not in FAIR}
    figures["afs-p tie=coin"] = measured("afs-p", {"tie": "coin"})
    cycle = {"plain": median_ms(whole_step(1)), "half of the jobs with a step of 4": median_ms(whole_step(4))}
    print_figures(
        {
            "jobs": JOBS,
            "gpus": GPUS,
            "decision": figures,
            "max_min_cycle_ms": cycle,
            "gain_over_coin": gain_against_coin(),
        }
    )


if __name__ == "__main__":
    main()
