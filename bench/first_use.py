"""What the first use after the install costs, and how soon `shoal --help` answers. Prints JSON.

    python bench/first_use.py [POLICY...]

Each policy runs the sample with no compiled kernels anywhere, then again; the difference is what compiling adds
(target: below 15 s); so it does on the sample's nodes of three GPU types, where more kernels are needed. A second
process helps, if the machine has a second processor. `shoal --help` is timed warm, the median of seven (target: 0.3 s).
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


def run_s(command: list[str], cache: str) -> float:
    began = time.perf_counter()
    subprocess.run(
        [*SHOAL, *command],
        env={**os.environ, "NUMBA_CACHE_DIR": cache},
        capture_output=True,
        check=True,
    )
    return time.perf_counter() - began


def first_use(*command: str) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as cache:
        first_s, again_s = run_s([*command], cache), run_s([*command], cache)
    return {"first_s": first_s, "again_s": again_s, "added_s": first_s - again_s}


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
                "target_added_s": 15.0,
                **{p: on_sample(p) for p in policies},
                **{f"{p} on nodes": on_nodes(p) for p in policies},
            },
        }
    )


if __name__ == "__main__":
    main()
