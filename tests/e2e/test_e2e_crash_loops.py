"""Live jobs of real processes that crash again and again end, and a fixed number of GPUs is one live job."""

import re
import sys
from collections import Counter
from pathlib import Path

import pytest
from live_cluster import eventually

SCRIPTS = Path(__file__).parent / "scripts"
pytest.importorskip("torch")
pytestmark = pytest.mark.timeout(240)


def crash(cluster, name, who, restarts):
    command = [sys.executable, SCRIPTS / "crashing.py", who, 3]
    options = ["--name", name, "--gpus", "2..2", "--max-restarts", restarts]
    done = cluster.shoal("run", *options, "--", *command, code=100, timeout=200)
    assert "SIGSEGV" in done.stderr, "the reason is told to who waits"
    eventually(lambda: cluster.json("status")["used_gpus"] == 0)
    return cluster.json("show", name)


def started(cluster, name):
    return len(cluster.json("events", name, "--type", "worker.started")["items"])


def test_a_job_whose_workers_all_die_at_a_step_is_restarted_as_often_as_it_says_and_ends(shared):
    job = crash(shared, "loop", "all", 1)
    assert (job["state"], job["restarts"]) == ("failed", 1)
    assert "SIGSEGV" in job["message"]
    assert "it was started again once before" in job["message"]
    (rest,) = shared.json("events", "loop", "--type", "job.restarted")["items"]
    assert rest["data"]["rest_s"] > 0
    # Two attempts. In each, two workers, and one more after each of the first two losses at most.
    assert started(shared, "loop") <= 8, shared.shoal("events", "loop").stdout


def test_a_job_whose_last_worker_dies_soon_after_it_joins_ends_and_is_not_refilled_for_ever(shared):
    job = crash(shared, "refill", "last", 0)
    assert (job["state"], job["restarts"]) == ("failed", 0)
    assert "3 workers in a row were lost soon after they started" in job["message"]
    assert "SIGSEGV" in job["message"]
    assert started(shared, "refill") <= 4, shared.shoal("events", "refill").stdout


def test_a_fixed_number_of_gpus_is_one_live_job_with_so_many_workers(shared):
    command = [sys.executable, SCRIPTS / "elastic.py", 12, 0.3]
    done = shared.shoal("run", "--name", "three", "--gpus", 3, "--", *command, code=0, timeout=200)
    steps = re.findall(r"step (\d+) of 12 on (\d)", done.stdout)
    assert Counter(int(step) for step, _ in steps) == Counter(range(12)), "one of them is main"
    assert {size for _, size in steps} == {"3"}, "it began with three workers, not with one"
    job = shared.json("show", "three")
    assert (job["resize"], job["min_gpus"], job["max_gpus"]) == ("live", 3, 3)
    assert started(shared, "three") == 3
