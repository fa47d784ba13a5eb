"""How much time the first use of a policy adds, and how soon `shoal --help` answers. Prints JSON.

    python bench/first_use.py [POLICY...]

Each policy runs the sample with an empty kernel cache, then again. The difference is what compiling adds: at most 15 s
for plain policies and 25 s for fair ones. Each policy also runs on the sample's nodes with three GPU types, where
more kernels are needed. `shoal --help` takes at most 0.3 s, the median of seven runs.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time

from _figures import median_ms, print_figures
from shoal.policies.registry import policy_names
from shoal.sim.samples import sample_path

SHOAL = [sys.executable, "-m", "shoal.cli.main"]


def run_s(command: list[str], cache: str) -> tuple[float, float]:
    """Wall and CPU seconds."""
    began, before = time.perf_counter(), os.times()
    subprocess.run(
        [*SHOAL, *command],
        env={**os.environ, "NUMBA_CACHE_DIR": cache},
        capture_output=True,
        check=True,
    )
    after = os.times()
    cpu_s = after.children_user + after.children_system - before.children_user - before.children_system
    return time.perf_counter() - began, cpu_s


def first_use(*command: str) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as cache:
        (first_s, first_cpu_s), (again_s, again_cpu_s) = (run_s([*command], cache) for _ in range(2))
    return {
        "first_s": first_s,
        "again_s": again_s,
        "added_s": first_s - again_s,
        "added_cpu_s": first_cpu_s - again_cpu_s,
    }


def on_sample(policy: str) -> dict[str, float]:
    return first_use("sim", "run", "--sample", "--policy", policy)


def on_nodes(policy: str) -> dict[str, float]:
    jobs, profiles, cluster = (str(sample_path(n)) for n in ("jobs.csv", "profiles.csv", "cluster.yaml"))
    return first_use("sim", "run", jobs, "-p", profiles, "--cluster", cluster, "--policy", policy)


def main() -> None:
    policies = sys.argv[1:] or policy_names()
    help_ms = median_ms(lambda: subprocess.run([*SHOAL, "--help"], capture_output=True, check=True), 7)
    print_figures(
        {
            "help_s": {"median": help_ms / 1e3, "target": 0.3},
            "first_use": {
                "target_added_s": {"plain": 15.0, "fair": 25.0},
                **{p: on_sample(p) for p in policies},
                **{f"{p} on nodes": on_nodes(p) for p in policies},
            },
        }
    )


if __name__ == "__main__":
    main()
