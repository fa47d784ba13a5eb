"""The example sweep: Hydra starts 8 runs, which share 4 virtual GPUs."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
pytestmark = pytest.mark.timeout(240)
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "sweep"


def test_eight_runs_share_four_gpus(cluster, tmp_path):
    for name in ("train.py", "config.yaml"):
        shutil.copy(EXAMPLE / name, tmp_path)
    done = subprocess.run(
        [sys.executable, "train.py", "-m"],
        cwd=tmp_path,
        env=cluster.env,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    jobs = cluster.json("ps", "-a")["items"]
    assert len(jobs) == 8
    assert {job["state"] for job in jobs} == {"succeeded"}
    assert {job["gpus"] for job in jobs} == {0}
    assert {(job["min_gpus"], job["max_gpus"]) for job in jobs} == {(1, 1)}
    found = [
        line for job in jobs for line in cluster.shoal("logs", job["id"]).stdout.split() if "lr=" in line
    ]
    assert sorted(found) == sorted(f"lr={lr}" for lr in (0.001, 0.003, 0.01, 0.03) for _ in range(2))
    # Never more than four at once: between its start and its end a job holds one GPU.
    times = [(job["started_at"], 1) for job in jobs] + [(job["finished_at"], -1) for job in jobs]
    running = peak = 0
    for _, change in sorted(times):
        running += change
        peak = max(peak, running)
    assert peak == 4
    logs = list((tmp_path / "multirun").rglob("*_0_log.out"))
    assert len(logs) == 8
