"""`shoal sim run` and `compare` as a person runs them: figures, rows per job, Ctrl-C."""

from __future__ import annotations

import contextlib
import json
import math
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import polars as pl
import psutil
import pytest

from shoal.cli.main import main
from shoal.cli.sim_run import write_per_job
from shoal.core.cluster import Cluster
from shoal.policies.registry import make_policy
from shoal.sim.engine import Simulation
from shoal.sim.generate import Recipe, generate
from shoal.sim.inputs import read_profiles, write_jobs
from shoal.sim.run_record import RunRecord
from shoal.sim.samples import sample_path
from shoal.sim.summary import waited_s

from .small import PROFILES, job

FIGURES = (
    "policy", "jobs", "avg_jct_s", "p50_jct_s", "p95_jct_s", "p99_jct_s", "makespan_s", "avg_queue_s", "utilization",
    "share_changes_per_job", "finish_time_fairness", "gpu_seconds_by_user", "decisions", "wall_s", "peak_memory_mb",
)  # fmt: skip


def shoal(capsys, *args):
    """(exit code, stdout, stderr)"""
    with pytest.raises(SystemExit) as stopped:
        main([str(arg) for arg in args])
    said = capsys.readouterr()
    return stopped.value.code, said.out, said.err


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_a_runs_json_agrees_with_its_rows_per_job(capsys, tmp_path, ending):
    rows = tmp_path / f"rows.{ending}"
    code, out, _ = shoal(
        capsys, "sim", "run", "--sample", "--policy", "afs-l", "--per-job", rows, "-o", "json"
    )
    run = json.loads(out)
    assert code == 0
    assert set(FIGURES) <= set(run)
    frame = pl.read_csv(rows) if ending == "csv" else pl.read_parquet(rows)
    assert frame.height == run["jobs"] == run["finished"]
    jct_s = (frame["finish_s"] - frame["submit_s"]).to_numpy()
    assert run["avg_jct_s"] == pytest.approx(jct_s.mean())
    for q in (50, 95, 99):
        value = np.sort(jct_s)[math.ceil(q / 100 * (len(jct_s) - 1))]  # a job's own, the next one up
        assert run[f"p{q}_jct_s"] == pytest.approx(value)
    users = frame.group_by("user").agg(pl.col("gpu_s").sum())
    assert dict(users.rows()) == pytest.approx(run["gpu_seconds_by_user"])
    rho = run["finish_time_fairness"]
    deciles = rho["deciles"]
    assert deciles == sorted(deciles)
    assert (len(deciles), deciles[-1]) == (11, rho["max"])
    assert deciles[5] == rho["p50"]


@pytest.mark.parametrize(("verb", "flag"), [("run", "--per-job"), ("compare", "--report")])
def test_a_file_that_cannot_be_written_is_told_before_the_work(capsys, tmp_path, monkeypatch, verb, flag):
    monkeypatch.setattr("shoal.sim.engine.Simulation.run", lambda *_, **__: pytest.fail("it ran"))
    code, out, err = shoal(capsys, "sim", verb, "--sample", flag, tmp_path / "no" / "where.x")
    assert (code, out) == (2, "")
    assert "cannot write" in err
    assert err.count("\n") == 1
    code, _, err = shoal(capsys, "sim", verb, "--sample", flag, tmp_path)
    assert code == 2
    assert "is a directory" in err


@pytest.fixture(scope="module")
def long_trace(tmp_path_factory):
    """More than a run can finish before Ctrl-C."""
    path = tmp_path_factory.mktemp("trace") / "jobs.csv"
    profiles = read_profiles(sample_path("profiles.csv"))
    write_jobs(path, generate(Recipe(jobs=100_000, gpus=2_490), profiles, np.random.default_rng(0)))
    return path


def words_until(terminal, part):
    """What is written to a terminal, up to the first time that it holds `part`, a regular expression."""
    text = b""
    while not re.search(part, text):
        assert select.select([terminal], [], [], 120)[0], f"no {part!r} in {text!r}"
        text += os.read(terminal, 1 << 16)
    return text.decode()


WHICH = {
    "run": ["--policy", "afs-p"],
    "compare": ["--policies", "afs-p,fifo,srtf,afs-l", "--workers", "1"],
}


@pytest.mark.parametrize(
    ("verb", "how", "code"),
    [
        ("run", signal.SIGINT, 130),
        ("run", signal.SIGTERM, 143),
        ("run", signal.SIGHUP, 129),
        ("compare", signal.SIGINT, 130),
        ("compare", signal.SIGTERM, 143),
    ],
    ids=["a run by Ctrl-C", "by SIGTERM", "by SIGHUP", "a comparison by Ctrl-C", "the same by SIGTERM"],
)
def test_a_signal_ends_with_what_is_known_so_far(tmp_path, long_trace, verb, how, code):
    ours, theirs = pty.openpty()
    out = tmp_path / "out.json"
    extra = ["--per-job", tmp_path / "rows.csv"] if verb == "run" else ["--report", tmp_path / "page.html"]
    command = [
        sys.executable,
        "-m",
        "shoal.cli.main",
        "sim",
        verb,
        long_trace,
        "--gpus",
        "2490",
        *WHICH[verb],
        *extra,
    ]
    with out.open("w") as stdout:
        running = subprocess.Popen(
            [*map(str, command), "-o", "json"], stdout=stdout, stderr=theirs, start_new_session=True
        )
    try:
        bar = words_until(ours, rb"simulated [1-9]\d*d")  # the bar may skip a day
        os.killpg(running.pid, how)
        assert "of 100,000 jobs" in bar
        last_words = words_until(
            ours, b"not begun: fifo, srtf, afs-l" if verb == "compare" else b"interrupted"
        )
        assert running.wait(120) == code
    finally:
        running.kill()
        running.wait()
        os.close(ours)
        os.close(theirs)
    runs = json.loads(out.read_text())
    if verb == "compare":  # by one process, one after the other
        assert [run["label"] for run in runs["items"]] == ["afs-p"]
        assert runs["not_begun"] == ["fifo", "srtf", "afs-l"]
        assert "0 of 4 runs had ended" in last_words
    for run in runs["items"] if verb == "compare" else [runs]:
        assert run["interrupted"]
        assert 0 < run["finished"] < 100_000
        assert run["makespan_s"] is None
        assert run["simulated_s"] > 80_000
        assert sum(run["gpu_seconds_by_user"].values()) > 0
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"out.json", "rows.csv" if verb == "run" else "page.html"}


def test_ctrl_c_twice_ends_a_comparison_at_once_with_a_word(tmp_path, long_trace):
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "shoal.cli.main", "sim", "compare", str(long_trace), "--gpus", "2490"]
    command += ["--policies", "afs-p,afs-l", "--report", str(tmp_path / "page.html")]
    running = subprocess.Popen(command, stdout=theirs, stderr=theirs, start_new_session=True)
    os.close(theirs)
    try:
        words_until(ours, rb"simulated [1-9]\d*d")
        os.killpg(running.pid, signal.SIGINT)
        words_until(ours, rb"Ctrl-C again: at once")
        os.killpg(running.pid, signal.SIGINT)
        assert running.wait(120) == 130
        told = words_to_the_end(ours).rpartition("shoal: interrupted")
    finally:
        running.kill()
        running.wait()
        os.close(ours)
    assert "Traceback" not in told[0]
    assert told[1:] == ("shoal: interrupted", "\r\n")
    assert not list(tmp_path.iterdir())


def words_to_the_end(terminal):
    """What is written to a terminal until nobody has it open any more, neither a process that another one left."""
    text = b""
    with contextlib.suppress(OSError):
        while part := os.read(terminal, 1 << 16):
            text += part
    return text.decode()


RUN_FIFO = [sys.executable, "-m", "shoal.cli.main", "sim", "run", "--sample", "--policy", "fifo", "-o"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="NO /dev/full here")
@pytest.mark.parametrize("output", ["table", "json"])
def test_output_that_cannot_be_written_is_told_in_a_line(output):
    command = [*RUN_FIFO, output]
    with Path("/dev/full").open("w") as full:
        ran = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert ran.returncode == 1
    assert ran.stderr.splitlines()[-1] == "shoal: cannot write the output: No space left on device"
    assert "Traceback" not in ran.stderr


@pytest.mark.parametrize("output", ["table", "json"])
def test_output_that_nobody_reads_on_is_no_error(output):
    command = [*RUN_FIFO, output]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    running.stdout.close()
    assert "Traceback" not in running.stderr.read()
    running.stderr.close()
    assert running.wait(60) == 0


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["compare", "--sample", "--policies", "fifo", "--report", "jobs.csv"], "its name must end in .html"),
        (["run", "jobs.csv", "--sample"], "--sample names a trace"),
        (
            ["run", "--sample", "--policy", "afs-p", "--option", "quantum_s=0.0001"],
            "must be 1 second or more",
        ),
        (["run", "--sample", "--policy", "themis", "--option", "lease_s=1e-320"], "must be 1 second or more"),
        (["run", "--sample", "--policy", "gandiva-fair", "--option", "quantum_s=0.5"], "1 second or more"),
        (["gen", "--users", "-3", "-o", "jobs.csv"], "give 1 to 1,000,000 users, not -3"),
    ],
)
def test_a_wish_that_cannot_be_meant_is_refused(words, part, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code, _, err = shoal(capsys, "sim", *words)
    assert (code, err.count("\n")) == (2, 1)
    assert part in err
    assert not list(tmp_path.iterdir())


def test_a_run_tells_what_was_run_and_which_type_a_pool_is_of(tmp_path, capsys):
    jobs, profiles = tmp_path / "jobs.csv", tmp_path / "profiles.csv"
    jobs.write_text("submit_s,model,iterations,requested_gpus,max_gpus\n0,net,100,1,1\n")
    profiles.write_text("model,gpus,seconds_per_iteration,gpu_type\nnet,1,2,v100\nnet,1,1,a100\n")
    words = ["run", jobs, "--gpus", "8", "--policy", "afs-p", "--option", "quantum_s=600", "-o", "json"]
    code, out, err = shoal(capsys, "sim", *words, "--costs", "restart", "--restart-s", "7,net=5")
    assert code == 0
    assert "the profiles have speeds for a100 and v100; --gpus 8 is a pool of v100" in err
    setup = json.loads(out)["setup"]
    assert setup["jobs"] == str(jobs)
    assert setup["profiles"] == str(profiles)
    assert setup["options"] == {"quantum_s": "600"}
    assert setup["costs"] == {"kind": "restart", "restart_s": 7.0, "restart_s of net": 5.0}
    assert setup["gpu_type"] == "v100"
    assert "needs" not in setup


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_rows_of_jobs_that_did_not_finish_are_empty_where_nothing_is_known(tmp_path, ending):
    jobs = [
        job("short", 0.0, 10.0, 2),
        job("long", 0.0, 1e6, 1),
        job("waits", 20.0, 5.0, 2),
        job("late", 9e9, 5.0),
    ]
    simulation = Simulation(jobs, PROFILES, Cluster.pool(2), make_policy("fifo", {"backfill": "no"}))
    record = simulation.run(lambda now_s, done, total: now_s < 20.0, every=1)
    assert (record.interrupted, record.end_s) == (True, 20.0)
    record.end_s = 1000.0
    path = tmp_path / f"rows.{ending}"
    write_per_job(path, record)
    assert b"nan" not in path.read_bytes().lower() or ending == "parquet"
    frame = pl.read_csv(path) if ending == "csv" else pl.read_parquet(path)
    assert frame["job"].to_list() == ["short", "long", "waits", "late"]
    assert frame["jct_s"].to_list() == [5.0, None, None, None]
    assert frame["first_start_s"].to_list() == [0.0, 5.0, None, None]
    assert frame["queue_s"].to_list() == [0.0, 5.0, 980.0, None]


def test_a_paused_job_waits_until_the_end_of_the_run():
    record = RunRecord.empty("p", (job("paused", 10.0, 1.0), job("runs", 10.0, 1.0)), 2)
    record.first_start_s[:], record.wait_s[:], record.end_s = 12.0, 2.0, 100.0
    record.change_s, record.change_job, record.change_gpus = [12.0, 12.0, 30.0], [0, 1, 0], [1, 1, 0]
    assert waited_s(record).tolist() == [72.0, 2.0]


@pytest.mark.parametrize(
    ("words", "policies"), [("run --policy afs-l", 1), ("compare --policies fifo,srtf --workers 1", 2)]
)
def test_kernels_are_compiled_once_and_it_is_said(tmp_path, words, policies):
    command = [sys.executable, "-m", "shoal.cli.main", "sim", *words.split(), "--sample", "-o", "json"]
    where = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    first, again = (
        subprocess.run(command, env=where, capture_output=True, text=True, check=True) for _ in range(2)
    )
    assert first.stderr.count("first use of a policy here") == 1
    assert "compiling" not in again.stderr
    for ran, compiled in ((first, True), (again, False)):
        runs = json.loads(ran.stdout)
        runs = runs.get("items", [runs])
        assert len(runs) == policies
        assert (sum(run["compile_s"] for run in runs) > 0) == compiled


def at_work(comparison: subprocess.Popen[str]) -> int:
    """The process that simulates, once there is one."""
    while comparison.poll() is None:
        for pid in children_of(comparison.pid):
            if busy_s(pid) > 3:
                return pid
        time.sleep(0.1)
    raise AssertionError(f"it ended with {comparison.returncode}")


def comparison_of(trace: Path, policies: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "shoal.cli.main", "sim", "compare", str(trace), "--gpus", "2490"]
    return subprocess.Popen([*command, "--policies", policies], stderr=subprocess.PIPE, text=True)


def test_a_killed_process_of_a_comparison_is_one_line(long_trace):
    running = comparison_of(long_trace, "afs-l")
    try:
        os.kill(at_work(running), signal.SIGKILL)
        _, said = running.communicate(timeout=120)
    finally:
        running.kill()
        running.wait()
    assert running.returncode == 1
    assert "Traceback" not in said
    assert "a process of this comparison was killed" in said
    assert "--workers 1" in said


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_comparison_that_is_killed_leaves_no_process_behind(long_trace, how):
    running = comparison_of(long_trace, "afs-l,srtf")
    try:
        at_work(running)
        everyone = [psutil.Process(pid) for pid in children_of(running.pid)]
        assert len(everyone) >= 3
    finally:
        running.send_signal(how)
        running.communicate(timeout=60)
    _, left = psutil.wait_procs(everyone, timeout=60)
    for process in left:
        process.kill()
    assert left == []


def children_of(pid: int) -> list[int]:
    return [int(c) for c in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def busy_s(pid: int) -> float:
    """The one that simulates is the one that uses the processor."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
