"""Live trading on virtual nodes of two types: `python bench/trading.py [--window-s 60]`.

Two users with equal tickets have two jobs each on a node with 2 fast GPUs and one with 4 slow ones. The jobs of one
user gain much on the fast type, those of the other hardly. The same jobs run under gandiva-fair with and without
trading, each time in a cluster of its own on this machine (`shoal up --cluster`). Steps are counted over equal times.
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

CLUSTER = """\
nodes:
  - {count: 1, gpus: 2, type: fast, name: fast}
  - {count: 1, gpus: 4, type: slow, name: slow}
users: {ada: 1, bob: 1}
"""
SCRIPT = """\
import os, sys, time
import shoal.torch as shoal
import torch
gain = {"fast": float(sys.argv[1]), "slow": 1.0}
job = shoal.init()
model = torch.nn.Linear(2, 1)
model, optimizer = job.wrap(model, torch.optim.SGD(model.parameters(), lr=0.01))
data = torch.utils.data.TensorDataset(torch.zeros(400_000, 2), torch.zeros(400_000, 1))
for x, y in job.loader(data, batch_size=4):
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(model(x), y).backward()
    time.sleep(0.4 / gain[os.environ["SHOAL_GPU_TYPE"]])
    optimizer.step()
"""
#: User -> gain on the fast type, GPUs of each of the two jobs.
USERS = {"ada": (4.0, 2), "bob": (1.3, 2)}
OPTIONS = ("quantum_s=5", "profiling=user", "visit_s=10", "balance_s=10", "rest_s=5")


class Shoal:
    def __init__(self, home: Path) -> None:
        outside = {k: v for k, v in os.environ.items() if not k.startswith("SHOAL_")}
        self.env = outside | {"SHOAL_HOME": str(home), "OMP_NUM_THREADS": "1"}

    def __call__(self, *args: str, token: Path | None = None) -> str:
        env = self.env if token is None else self.env | {"SHOAL_TOKEN_FILE": str(token)}
        command = [sys.executable, "-m", "shoal.cli.main", *args]
        done = subprocess.run(command, env=env, text=True, capture_output=True, timeout=120)
        if done.returncode:
            raise SystemExit(f"{' '.join(args)}: {done.stderr}")
        return done.stdout

    def json(self, *args: str) -> Any:
        return json.loads(self(*args, "-o", "json"))


def measure(directory: Path, *, trading: bool, warm_up_s: float, window_s: float) -> dict[str, Any]:
    """Steps per second of each user, and the GPU-seconds of each type that it bought and sold."""
    directory.mkdir()
    (directory / "cluster.yaml").write_text(CLUSTER)
    (directory / "train.py").write_text(SCRIPT)
    shoal = Shoal(directory / "home")
    options = [word for option in (*OPTIONS, f"trading={trading}") for word in ("--policy-option", option)]
    shoal("up", "--cluster", str(directory / "cluster.yaml"), "--policy", "gandiva-fair", *options)
    try:
        for user, (gain, gpus) in USERS.items():
            if (
                os.geteuid() == 0
            ):  # a server of root runs jobs under accounts of the machine, except those of admins
                shoal("user", "set", user, "--role", "admin")
            token = directory / f"{user}.token"
            token.write_text(shoal("token", "create", "--user", user))
            token.chmod(0o600)
            for i in (1, 2):
                command = ("run", "-d", "--name", f"{user}{i}", "--gpus", str(gpus), "--resize", "live", "--")
                shoal(*command, sys.executable, str(directory / "train.py"), str(gain), token=token)
        time.sleep(warm_up_s)
        first, began_s = steps(shoal), time.monotonic()
        time.sleep(window_s)
        last, took_s = steps(shoal), time.monotonic() - began_s
        shares = shoal.json("shares")["items"]
        return {
            "steps_per_s": {user: (last[user] - first[user]) / took_s for user in USERS},
            "traded_gpu_s": {s["user"]: s["traded_by_type_gpu_s"] for s in shares if s["user"] in USERS},
            "shares": shoal("shares"),
        }
    finally:
        shoal("down", "-y")


def steps(shoal: Shoal) -> dict[str, int]:
    found = dict.fromkeys(USERS, 0)
    for user in USERS:
        for i in (1, 2):
            found[user] += shoal.json("show", f"{user}{i}")["step"] or 0
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--warm-up-s", type=float, default=40.0)
    parser.add_argument("--window-s", type=float, default=60.0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="shoal-trading-") as place:
        runs = {
            trading: measure(
                Path(place) / str(trading),
                trading=trading,
                warm_up_s=given.warm_up_s,
                window_s=given.window_s,
            )
            for trading in (False, True)
        }
    gains = {u: runs[True]["steps_per_s"][u] / runs[False]["steps_per_s"][u] for u in USERS}
    reached = {
        "no trade where it is off": not any(runs[False]["traded_gpu_s"].values()),
        "`shoal shares` shows that ada buys fast GPUs from bob": shows_trade(runs[True]["traded_gpu_s"]),
        "both users' throughput exceeds that without trading": all(gain > 1 for gain in gains.values()),
    }
    print(runs[True]["shares"])
    for trading, run in runs.items():
        print(
            f"trading={trading}: steps/s {rounded(run['steps_per_s'])}, bought {rounded(run['traded_gpu_s'])}"
        )
    print("gain by trading:", {user: f"{gain:.2f}x" for user, gain in gains.items()})
    print("reached:", reached, f"load average {os.getloadavg()[1]:.1f}")
    return 0 if all(reached.values()) else 1


def shows_trade(traded: dict[str, dict[str, float]]) -> bool:
    ada, bob = traded["ada"], traded["bob"]
    return ada.get("fast", 0) > 0 > ada.get("slow", 0) and bob.get("slow", 0) > 0 > bob.get("fast", 0)


def rounded(found: Any) -> Any:
    return {k: rounded(v) for k, v in found.items()} if isinstance(found, dict) else round(found, 2)


if __name__ == "__main__":
    sys.exit(main())
