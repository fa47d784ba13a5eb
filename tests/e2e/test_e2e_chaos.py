"""A short form of bench/chaos.py: nothing is lost when servers, workers, keepers and warm parents are killed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

CHAOS = Path(__file__).parents[2] / "bench" / "chaos.py"


def test_a_few_dozen_kills_and_stops_lose_nothing() -> None:
    options = ["--kills", "24", "--seed", "3", "--minutes", "3", "--per-s", "2", "--most-epochs", "6"]
    done = subprocess.run([sys.executable, CHAOS, *options], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(done.stdout)
    assert figures["faults"] >= 20
    assert figures["live_jobs_exact_by_their_weights"] >= 1
    assert figures["workers_on_the_agent"] >= 1
