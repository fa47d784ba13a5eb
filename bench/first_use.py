"""What the first use after the install costs, and how soon `shoal --help` answers. Prints JSON.

    python bench/first_use.py [POLICY...]

Each policy runs the sample with no compiled kernels anywhere, then again; the difference is what compiling adds
(target: below 15 s). `shoal --help` is timed warm, the median of seven (target: 0.3 s).
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time

from _figures import median_ms, print_figures
from shoal.policies.registry import policy_names

SHOAL = [sys.executable, "-m", "shoal.cli.main"]


def run_s(policy: str, cache: str) -> float:
    began = time.perf_counter()
    subprocess.run(
        [*SHOAL, "sim", "run", "--sample", "--policy", policy],
        env={**os.environ, "NUMBA_CACHE_DIR": cache},
        capture_output=True,
        check=True,
    )
    return time.perf_counter() - began


def first_use(policy: str) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as cache:
        first_s, again_s = run_s(policy, cache), run_s(policy, cache)
    return {"first_s": first_s, "again_s": again_s, "added_s": first_s - again_s}


def main() -> None:
    help_ms = median_ms(lambda: subprocess.run([*SHOAL, "--help"], capture_output=True, check=True), 7)
    print_figures(
        {
            "help_s": {"median": help_ms / 1e3, "target": 0.3},
            "first_use": {
                "target_added_s": 15.0,
                **{p: first_use(p) for p in sys.argv[1:] or policy_names()},
            },
        }
    )


if __name__ == "__main__":
    main()
