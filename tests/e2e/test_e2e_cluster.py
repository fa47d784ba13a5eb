"""Commands of a fixed size, and a machine that misbehaves: waiting, disks that fill, clocks that jump."""

import os
import subprocess
import sys
import time

import psutil
import pytest
from live_cluster import SHOAL, Cluster, eventually


def test_down_leaves_no_process_and_up_finds_everything_again(cluster):
    cluster.up(gpus=2)
    cluster.shoal("run", "--name", "one", "--", "echo", "hello", code=0)
    cluster.shoal("run", "-d", "--name", "two", "--gpus", "2", "--", "sleep", "600", code=0)
    cluster.shoal("wait", "two", "--for", "running", "--timeout", "30s", code=0)
    cluster.shoal("down", "-y", code=0)
    assert cluster.processes() == []
    cluster.up(gpus=2)
    assert cluster.shoal("logs", "one", code=0).stdout == "hello\n"
    assert {job["name"] for job in cluster.json("ps", "-a")["items"]} == {"one", "two"}


def test_kept_jobs_run_on_without_a_server_and_are_taken_over(cluster, tmp_path):
    cluster.up(gpus=1)
    script = f"while [ ! -e {tmp_path}/go ]; do sleep 0.1; done; echo end"
    cluster.shoal("run", "-d", "--name", "kept", "--", "sh", "-c", script, code=0)
    cluster.shoal("wait", "kept", "--for", "running", "--timeout", "30s", code=0)
    pid = next(w["pid"] for w in cluster.json("show", "kept")["workers"] if w["pid"])
    cluster.shoal("down", "-y", "--keep-jobs", code=0)
    assert psutil.pid_exists(pid)
    (tmp_path / "go").touch()
    eventually(lambda: not psutil.pid_exists(pid))
    cluster.up(gpus=1)
    cluster.shoal("wait", "kept", "--timeout", "30s", code=0)
    assert cluster.shoal("logs", "kept").stdout == "end\n"


def test_why_names_who_is_ahead_and_what_would_start_it_now(shared):
    shared.shoal("policy", "set", "fifo", code=0)
    shared.shoal("run", "-d", "--name", "first", "--gpus", "3", "--", "sleep", "600", code=0)
    shared.shoal("wait", "first", "--for", "running", "--timeout", "30s", code=0)
    shared.shoal(
        "run", "-d", "--name", "second", "--gpus", "2", "--resize", "never", "--", "sleep", "600", code=0
    )
    why = eventually(lambda: (w := shared.json("why", "second"))["reason"] and w)
    assert why["job"]["state"] == "pending"
    assert [job["name"] for job in why["ahead"]] == ["first"]
    assert why["starts_in"]["unknown"] or why["starts_in"]["basis"]
    text = shared.shoal("why", "second", code=0).stdout
    assert why["reason"]["sentence"] in text
    smaller = [could for could in why["could"] if could["change"] == "min_gpus"]
    assert [could["value"] for could in smaller] == [1]
    shared.shoal("scale", "second", "--pin", "1", code=0)
    shared.shoal("wait", "second", "--for", "running", "--timeout", "30s", code=0)


def test_a_failing_job_is_started_again_as_often_as_it_says(shared, tmp_path):
    script = f"echo try >> {tmp_path}/tries; exit 1"
    args = ["--name", "again", "--max-restarts", "2", "--", "sh", "-c", script]
    shared.shoal("run", *args, code=100)
    assert (tmp_path / "tries").read_text() == "try\n" * 3
    assert shared.json("show", "again")["restarts"] == 2


def _pids(cluster, job):
    """The pids of a job's workers, once all are known."""
    pids = [w["pid"] for w in cluster.json("show", job)["workers"]]
    return pids if all(pids) else None


def test_a_gang_whose_member_is_killed_fails_as_a_whole_and_leaves_nobody(shared):
    shared.shoal("run", "-d", "--name", "gang", "--gpus", "2", "--", "sleep", "601", code=0)
    shared.shoal("wait", "gang", "--for", "running", "--timeout", "30s", code=0)
    pids = eventually(lambda: _pids(shared, "gang"))
    psutil.Process(pids[0]).kill()
    shared.shoal("wait", "gang", "--timeout", "30s", code=100)
    job = shared.json("show", "gang")
    assert "KILL" in f"{job['signal']} {job['message']}"
    eventually(lambda: not any(psutil.pid_exists(pid) for pid in pids))


@pytest.fixture
def small_disk(tmp_path):
    """A home on 8 MB; skipped where nothing may be mounted."""
    place = tmp_path / "small"
    place.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", place], capture_output=True, check=False
    )
    if done.returncode:
        pytest.skip("a small tmpfs cannot be mounted here")
    made = Cluster(place / "home")
    yield made
    made.close()
    subprocess.run(["umount", "-l", place], check=False)


def test_a_full_disk_is_said_and_what_was_acknowledged_is_kept(small_disk):
    cluster = small_disk
    cluster.up(gpus=1)
    cluster.shoal("run", "--name", "before", "--", "true", code=0)
    fill = cluster.home.parent / "fill"
    with fill.open("wb") as file:
        try:
            while True:
                file.write(b"x" * 65536)
                file.flush()
        except OSError:
            pass
    full = [cluster.shoal("run", "-d", "--name", f"full-{i}", "--", "true") for i in range(3)]
    refused = [done for done in full if done.returncode]
    assert refused, "a job cannot be kept without room for it"
    assert all(done.returncode == 1 and "full" in done.stderr for done in refused), refused[0].stderr
    fill.unlink()
    cluster.shoal("run", "--name", "after", "--", "true", code=0)
    names = {job["name"] for job in cluster.json("ps", "-a")["items"]}
    assert {"before", "after"} <= names
    for done, name in zip(full, ("full-0", "full-1", "full-2")):
        assert (name in names) == (done.returncode == 0), "acknowledged if and only if kept"


CLOCK = """
import sys, time
real, shift = time.time, float(sys.argv.pop(1))
time.time = lambda: real() + shift
from shoal.server.serve import main
sys.exit(main())
"""


def test_a_clock_that_jumps_changes_no_length_of_time(cluster, tmp_path):
    """Each server sees a wall clock an hour off from that of the workers' keepers and of the server before."""
    cluster.shoal("up", "--gpus", "2", "--policy", "fifo", code=0)
    script = f"while [ ! -e {tmp_path}/go ]; do sleep 0.1; done"
    began_s = time.monotonic()
    cluster.shoal("run", "-d", "--name", "long", "--", "sh", "-c", script, code=0)
    cluster.shoal("down", "--keep-jobs", code=0)
    for shift in (-3600, 3600):
        command = [sys.executable, "-c", CLOCK, shift, "--home", cluster.home]
        server = subprocess.Popen(list(map(str, command)), env=cluster.env, stderr=subprocess.PIPE, text=True)
        try:
            eventually(lambda: cluster.shoal("status").returncode == 0, what="the server's start")
            before_s = time.monotonic()
            cluster.shoal("run", "--name", f"jump{shift}", "--", "sleep", "2", code=0)
            job, passed_s = cluster.json("show", f"jump{shift}"), time.monotonic() - before_s
            assert 2.0 <= job["running_s"] <= passed_s
            assert 0.0 <= job["waiting_s"] <= passed_s
            events = cluster.json("events", "-n", "1000")["items"]
            assert [e["at"] for e in events] == sorted(e["at"] for e in events), "time never goes back"
            assert 2.0 <= cluster.json("show", "long")["running_s"] <= time.monotonic() - began_s
        finally:
            cluster.shoal("down", "-y", "--keep-jobs")
            server.kill()
            server.communicate()


def test_several_homes_run_side_by_side(cluster, tmp_path):
    other = Cluster(tmp_path / "other")
    try:
        cluster.up(gpus=1)
        other.up(gpus=3)
        assert cluster.json("status")["total_gpus"] == 1
        assert other.json("status")["total_gpus"] == 3
        other.shoal("down", "-y", code=0)
        assert cluster.json("status")["total_gpus"] == 1
    finally:
        other.close()


def test_a_server_in_the_foreground_ends_on_ctrl_c(cluster):
    server = subprocess.Popen(
        [*SHOAL, "up", "--foreground", "--gpus", "1", "--policy", "fifo"],
        env=cluster.env,
        stderr=subprocess.PIPE,
    )
    eventually(lambda: cluster.shoal("status").returncode == 0)
    os.kill(server.pid, 2)
    assert server.wait(30) == 0
    server.communicate()
    cluster.shoal("status", code=6)
