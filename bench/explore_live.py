"""Live exploration: how soon a job that does not scale gives its GPUs to one that does.

Two jobs with emulated step times compete on 4 virtual GPUs: one takes half the time with twice the GPUs, the other
takes the same time with any number. The bench starts a server of its own, submits the second job when the first has
4 GPUs, and prints the seconds from that submission until they have 3 and 1, and the trials on the way.

    python bench/explore_live.py [--policies optimus,afs-p,fair-afs] [--explore 0.02]
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

SCRIPT = Path(__file__).parents[1] / "tests" / "e2e" / "scripts" / "elastic.py"
LIMIT_S = 180.0


def shoal(home: Path, *words: str) -> str:
    command = [sys.executable, "-m", "shoal.cli.main", *words]
    env = os.environ | {"SHOAL_HOME": str(home)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=env)
    if done.returncode:
        raise SystemExit(f"shoal {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


def document(home: Path, *words: str) -> Any:
    return json.loads(shoal(home, *words, "-o", "json"))


def sizes(home: Path) -> tuple[int, ...]:
    return tuple(document(home, "show", name)["gpus"] for name in ("scales", "flat"))


def run(policy: str, explore: float) -> None:
    with tempfile.TemporaryDirectory() as directory:
        home = Path(directory) / "home"
        shoal(home, "up", "--gpus", "4", "--policy", policy, "--explore", str(explore))
        try:
            for name, scaling in (("scales", "1"), ("flat", "0")):
                command = [sys.executable, str(SCRIPT), "200000", "0.4", scaling]
                shoal(home, "run", "-d", "--name", name, "--gpus", "1..4", "--", *command)
                if name == "scales":
                    while document(home, "show", "scales")["gpus"] < 4:
                        time.sleep(0.2)
            began, seen = time.monotonic(), []
            while time.monotonic() - began < LIMIT_S:
                now = sizes(home)
                if not seen or seen[-1][1] != now:
                    seen.append((time.monotonic() - began, now))
                if now == (3, 1) and seen[-1][0] + 8.0 < time.monotonic() - began:
                    break
                time.sleep(0.3)
            changes = ", ".join(f"{at_s:.0f} s {'/'.join(map(str, size))}" for at_s, size in seen)
            print(f"{policy}: {changes}", flush=True)
            for event in document(home, "events", "--type", "job.measur", "--tail", "100")["items"]:
                print(f"  {event['at'][11:19]} {event['message']}")
        finally:
            shoal(home, "down", "-y")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--policies", default="optimus,afs-p,fair-afs")
    parser.add_argument("--explore", type=float, default=0.02)
    given = parser.parse_args()
    for policy in given.policies.split(","):
        run(policy, given.explore)


if __name__ == "__main__":
    main()
