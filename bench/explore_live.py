"""Live exploration: how soon jobs with emulated step times get the shares that their true speeds give.

The bench starts a server of its own for each policy and each set of jobs, on 4 virtual GPUs:

    two      a job that takes half the time with twice the GPUs, and one that takes the same time with any number;
             the second is submitted when the first has 4 GPUs
    three    one that does not scale, one that scales with the root of its GPUs, and one that scales perfectly

    python bench/explore_live.py [--policies optimus,afs-p,fair-afs] [--sets two,three] [--explore 0.02]

It prints JSON: the shares under true profiles (simulated), the seconds from the last submission until the jobs have
them for good, whether that was within the limit, the sizes on the way, and the trials. Where the true speeds give equal
shares several allocations are right, so a set must have one answer only.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from shoal.core.cluster import Cluster
from shoal.core.job import GpuRange, Job
from shoal.core.profile import ANY_TYPE, Profile, SpeedCurve
from shoal.policies.registry import make_policy
from shoal.sim.costs import Costs
from shoal.sim.engine import Simulation
from shoal.sim.known_profiles import Knowledge

SCRIPT = Path(__file__).parents[1] / "tests" / "e2e" / "scripts" / "elastic.py"
GPUS, STEPS, STEP_S = 4, 200_000, 0.4
#: How long the bench waits, how soon the shares should be right, and how long they must stay so.
LIMIT_S, TARGET_S, STEADY_S = 180.0, 30.0, 8.0
#: By set: the jobs in order of submission, each with the power of its GPUs that its speed grows with.
SETS = {
    "two": {"scales": 1.0, "flat": 0.0},
    "three": {"flat": 0.0, "root": 0.5, "scales": 1.0},
}


def shoal(home: Path, *words: str) -> str:
    command = [sys.executable, "-m", "shoal.cli.main", *words]
    env = os.environ | {"SHOAL_HOME": str(home)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=env)
    if done.returncode:
        raise SystemExit(f"shoal {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


def document(home: Path, *words: str) -> Any:
    return json.loads(shoal(home, *words, "-o", "json"))


def sizes(home: Path, names: list[str]) -> list[int]:
    found = {job["name"]: job["gpus"] for job in document(home, "ps")["items"]}
    return [found.get(name, 0) for name in names]


def true_shares(jobs: dict[str, float], policy: str) -> list[int]:
    """The shares that the policy gives if it knows the true speeds."""
    gpus = np.arange(GPUS + 1)
    profiles = {
        name: Profile(name, {ANY_TYPE: {0: SpeedCurve(gpus.astype(float) ** scaling / STEP_S * (gpus > 0))}})
        for name, scaling in jobs.items()
    }
    submitted = [
        Job(name, 10.0 * i, GpuRange(1, GPUS), 1, model=name, iterations=float(STEPS))
        for i, name in enumerate(jobs)
    ]
    simulation = Simulation(
        submitted, profiles, Cluster.pool(GPUS, "v"), make_policy(policy, {}),
        knowledge=Knowledge.parse("true"), costs=Costs("concurrent"),
    )  # fmt: skip
    record = simulation.run(lambda now_s, done, total: now_s < 300.0, every=1)
    shares = [0] * len(jobs)
    for at_s, job, share in zip(record.change_s, record.change_job, record.change_gpus):
        if at_s <= 300.0:
            shares[job] = int(share)
    return shares


def submit(home: Path, jobs: dict[str, float]) -> None:
    """The next job comes when the jobs before it have all GPUs."""
    names: list[str] = []
    for name, scaling in jobs.items():
        while names and sum(sizes(home, names)) < GPUS:
            time.sleep(0.2)
        command = [sys.executable, str(SCRIPT), str(STEPS), str(STEP_S), str(scaling)]
        shoal(home, "run", "-d", "--name", name, "--gpus", f"1..{GPUS}", "--", *command)
        names.append(name)


def watch(home: Path, names: list[str], true: list[int]) -> list[tuple[float, list[int]]]:
    """The sizes from now on and when they began, until they are the true ones for a while."""
    began, seen = time.monotonic(), []
    while (now_s := time.monotonic() - began) < LIMIT_S:
        now = sizes(home, names)
        if not seen or seen[-1][1] != now:
            seen.append((round(now_s, 1), now))
        if now == true and now_s > seen[-1][0] + STEADY_S:
            break
        time.sleep(0.3)
    return seen


def run(policy: str, jobs: dict[str, float], explore: float) -> dict[str, Any]:
    true = true_shares(jobs, policy)
    with tempfile.TemporaryDirectory() as directory:
        home = Path(directory) / "home"
        shoal(home, "up", "--gpus", str(GPUS), "--policy", policy, "--explore", str(explore))
        try:
            submit(home, jobs)
            seen = watch(home, list(jobs), true)
            trials = document(home, "events", "--type", "job.measur", "--tail", "100")["items"]
        finally:
            shoal(home, "down", "-y")
    reached_s = seen[-1][0] if seen[-1][1] == true else None
    return {
        "jobs": list(jobs),
        "true_gpus": true,
        "reached_s": reached_s,
        "within_target": reached_s is not None and reached_s <= TARGET_S,
        "sizes": [{"at_s": at_s, "gpus": gpus} for at_s, gpus in seen],
        "trials": [f"{event['at'][11:19]} {event['job_name']}: {event['message']}" for event in trials],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--policies", default="optimus,afs-p,fair-afs")
    parser.add_argument("--sets", default="two,three")
    parser.add_argument("--explore", type=float, default=0.02)
    given = parser.parse_args()
    found = {
        policy: {name: run(policy, SETS[name], given.explore) for name in given.sets.split(",")}
        for policy in given.policies.split(",")
    }
    load_1min = round(os.getloadavg()[0], 1)
    print(json.dumps({"target_s": TARGET_S, "load": load_1min, "policies": found}, indent=1))


if __name__ == "__main__":
    main()
