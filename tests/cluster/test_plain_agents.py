"""Clusters of plain agents: each machine has its own processes, its own address, and cannot see the server's home."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path

import psutil
import pytest
from live_cluster import eventually
from machines import alive, await_nodes, needs_namespaces

from engines.absent import skip

SCRIPTS = Path(__file__).with_name("scripts")
STEPS = 1500

pytestmark = needs_namespaces


@pytest.mark.parametrize("world", [120], indirect=True)  # longer than any restart of the server takes
def test_a_job_spans_machines_and_outlives_the_server_an_agent_a_machine_and_all_machines(world):
    cluster, fast = world.cluster, world.directory / "fast"
    a, b = world.machine("a"), world.machine("b")
    await_nodes(cluster, "a", "b")
    command = [sys.executable, SCRIPTS / "train.py", STEPS, fast]
    cluster.shoal("run", "-d", "--name", "t", "--gpus", "1..4", "--", *command, code=0)
    world.await_size("t", 4)
    job = world.show("t")["id"]
    assert {w["node"] for w in world.show("t")["workers"]} == {"a", "b"}
    before, step = world.pids(job), world.step("t")
    assert len(before) == 4

    cluster.kill_server()
    world.up()
    world.await_step_after("t", step)
    assert world.pids(job) == before, "the workers of the killed server train on"

    first, step = a.agent, world.step("t")
    a.kill_agent()
    eventually(lambda: a.agent != first, what="another agent")
    await_nodes(cluster, "a", "b")
    world.await_step_after("t", step)
    assert world.pids(job) == before, "the workers of the killed agent train on"

    b.crash()
    # The step that was under way may have ended before the crash. The steps after it are of the workers that are left.
    world.await_step_after("t", world.step("t") + 2)
    (lost,) = [n for n in cluster.json("node", "ls")["items"] if n["name"] == "b"]
    assert lost["state"] == "unreachable", "training goes on before the lease of the lost machine has ended"
    assert lost["used"] == 2, "and before its GPUs are free for others"
    assert f"at {b.address}" in cluster.shoal("logs", "t", code=0).stdout, "its logs outlive the machine"
    b.boot()
    await_nodes(cluster, "a", "b")
    world.await_size("t", 4)

    cluster.shoal("pause", "t", code=0)
    eventually(lambda: world.show("t")["state"] == "paused" and not world.pids(job), 60, "the pause")
    step = world.step("t")
    a.crash()
    b.crash()
    world.machine("c"), world.machine("d")
    await_nodes(cluster, "c", "d")
    cluster.shoal("resume", "t", code=0)
    world.await_size("t", 4)
    fast.touch()
    cluster.shoal("wait", "t", "--timeout", "120s", code=0, timeout=150)
    assert world.show("t")["restarts"] == 0
    output = cluster.shoal("logs", "t", code=0).stdout
    steps = re.findall(r"^.*step \d+$", output, re.M)
    # A step that broke with a machine may be printed again when it is repeated, but none is missing.
    assert STEPS <= len(steps) <= STEPS + 3, f"paused at {step}"
    alone = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, env=cluster.env, check=True
    )
    (expected,) = re.findall(r"weights (-?\d\S*)", alone.stdout)
    weights = {float(found) for found in re.findall(r"weights (-?\d\S*)", output)}
    assert weights
    assert all(found == pytest.approx(float(expected), abs=2e-3) for found in weights), (weights, expected)


@pytest.mark.parametrize("world", [8], indirect=True)
def test_gangs_meet_on_the_node_of_rank_0_and_a_gpu_has_one_owner_over_a_partition(world):
    cluster = world.cluster
    x, y = world.machine("x"), world.machine("y")
    await_nodes(cluster, "x", "y")
    command = [sys.executable, SCRIPTS / "meet.py"]
    cluster.shoal("run", "-d", "--name", "g", "--gpus", 4, "--per-gpu", "--", *command, code=0)
    cluster.shoal("wait", "g", "--timeout", "60s", code=0, timeout=90)
    output = cluster.shoal("logs", "g", code=0).stdout
    said = re.findall(r"rank (\d) local (\d) at (\S+) master (\S+)", output)
    ranks = {int(rank): (int(local), at, master) for rank, local, at, master in said}
    assert sorted(ranks) == [0, 1, 2, 3]
    assert {master for _, _, master in ranks.values()} == {ranks[0][1]}, "MASTER_ADDR is the node of rank 0"
    assert sorted((at, local) for local, at, _ in ranks.values()) == [
        (m.address, local) for m in (x, y) for local in (0, 1)
    ]
    assert "met [1, 2, 3]" in output

    cluster.shoal("run", "-d", "--name", "p", "--gpus", 2, "--", "sleep", "1000", code=0)
    cluster.shoal("wait", "p", "--for", "running", "--timeout", "30s", code=0, timeout=60)
    p = world.show("p")
    at = world.machines[p["workers"][0]["node"]]
    other = y if at is x else x
    cluster.shoal("run", "-d", "--name", "q", "--gpus", 2, "--", "sleep", "1000", code=0)
    cluster.shoal("wait", "q", "--for", "running", "--timeout", "30s", code=0, timeout=60)
    cluster.shoal("run", "-d", "--name", "r", "--gpus", 2, "--", "sleep", "1000", code=0)
    (pid,) = eventually(lambda: list(at.workers(p["id"]).values()), what="the worker's process")
    os.kill(at.agent, signal.SIGSTOP)
    nodes = lambda: {n["name"]: n["state"] for n in cluster.json("node", "ls")["items"]}  # noqa: E731
    eventually(lambda: nodes()[at.name] in ("unreachable", "lost"), 60, "the partition")
    assert alive(pid), "its lease has not ended"
    assert world.show("r")["state"] == "pending"
    eventually(lambda: not alive(pid), 60, "the end of the lease")
    os.kill(at.agent, signal.SIGCONT)
    cluster.shoal("wait", "r", "--for", "running", "--timeout", "60s", code=0, timeout=90)
    assert not alive(pid)
    assert {w["node"] for w in world.show("r")["workers"]} == {at.name}
    assert world.show("q")["state"] == "running"
    assert other.workers(world.show("q")["id"]), "the other machine is not disturbed"


@pytest.mark.parametrize("world", [120], indirect=True)
def test_machines_that_may_not_join_are_told_why(world):
    cluster, x = world.cluster, world.machine("x")
    await_nodes(cluster, "x")

    def join(token: str, name: str, *more: str) -> subprocess.CompletedProcess:
        file = world.directory / f"{name}.token"
        file.write_text(token)
        words = [
            "--token-file",
            file,
            "--name",
            name,
            "--gpus",
            1,
            "--state",
            world.directory / f"state-{name}",
        ]
        command = [*x.command[:6], *map(str, words), *more]
        return subprocess.run(command, capture_output=True, text=True, env=cluster.env, timeout=60)

    good = cluster.json("node", "join-token", "create")["token"]
    fingerprint, _, secret = good.removeprefix("shoal-join:").partition(":")
    short = cluster.json("node", "join-token", "create", "--expires", "0.01s")["token"]
    cases = [
        ("wrong", f"shoal-join:{fingerprint}:{'0' * len(secret)}", "does not know this join token"),
        ("used", x.token.read_text(), "was used by the agent x"),
        ("late", short, "has expired"),
        ("text", "hello", "is not a join token"),
        ("elsewhere", f"shoal-join:{'0' * 64}:{secret}", "certificate"),
    ]
    for name, token, words in cases:
        done = join(token, name)
        assert (done.returncode, done.stderr.count("Traceback")) == (2, 0), done.stderr
        assert words in done.stderr.splitlines()[-1], (name, done.stderr)
    second = join(good, "second", "--name", "x")
    assert second.returncode == 2, second.stderr
    assert (
        "another agent named x is connected: give this one another --name" in second.stderr.splitlines()[-1]
    )
    api = json.loads((cluster.home / "server.json").read_text())["address"].removeprefix("http://")
    lost = join(good, "lost", "--join", api)
    assert lost.returncode == 2, lost.stderr
    assert f"{api} speaks HTTP" in lost.stderr.splitlines()[-1]
    refused = [e["message"] for e in cluster.json("events", "--type", "node.refused")["items"]]
    assert any("another agent named x" in text for text in refused)
    assert any("was used by the agent x" in text for text in refused)
    assert [n["state"] for n in cluster.json("node", "ls")["items"]] == ["ready"], "the cluster keeps running"


@pytest.mark.parametrize("world", [120], indirect=True)
def test_machines_return_in_another_order_and_a_suspended_gang_wakes_only_on_its_own(world):
    cluster = world.cluster
    a, b = world.machine("a"), world.machine("b")
    await_nodes(cluster, "a", "b")
    jobs = {}
    for name in ("one", "two"):
        cluster.shoal("run", "-d", "--name", name, "--gpus", 2, "--", "sleep", "1000", code=0)
        cluster.shoal("wait", name, "--for", "running", "--timeout", "60s", code=0, timeout=90)
        jobs[name] = world.show(name)
    pids = {name: eventually(lambda job=job: world.pids(job["id"]), what=name) for name, job in jobs.items()}
    places = {name: [w["node"] for w in job["workers"]] for name, job in jobs.items()}

    cluster.kill_server()
    agents = [world.machines[name].agent for name in ("a", "b")]
    for agent in agents:
        os.kill(agent, signal.SIGSTOP)
    world.up()
    for machine, agent in ((b, agents[1]), (a, agents[0])):  # not as they joined
        os.kill(agent, signal.SIGCONT)
        await_nodes(cluster, machine.name)
    for name in jobs:
        eventually(lambda name=name: world.show(name)["state"] == "running", 60, name)
    now = {name: world.show(name) for name in jobs}
    assert {name: [w["node"] for w in job["workers"]] for name, job in now.items()} == places
    assert {name: world.pids(job["id"]) for name, job in now.items()} == pids

    # `one` is suspended, and another job has its GPUs. The GPUs of the other machine are of no use to it.
    (pid,) = pids["one"].values()
    cluster.shoal("pause", "one", code=0)
    eventually(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED, 60, "the suspension")
    cluster.shoal("run", "-d", "--name", "guest", "--gpus", 2, "--", "sleep", "1000", code=0)
    cluster.shoal("wait", "guest", "--for", "running", "--timeout", "60s", code=0, timeout=90)
    assert [w["node"] for w in world.show("guest")["workers"]] == places["one"]
    cluster.shoal("cancel", "-y", "two", code=0)
    cluster.shoal("wait", "two", "--timeout", "60s", timeout=90)
    cluster.shoal("resume", "one", code=0)
    eventually(lambda: world.show("one")["state"] == "pending" and cluster.shoal("why", "one").stdout, 60)
    cluster.shoal(
        "run", "-d", "--name", "after", "--gpus", 2, "--", "sleep", "1000", code=0
    )  # a later decision
    cluster.shoal("wait", "after", "--for", "running", "--timeout", "60s", code=0, timeout=90)
    assert [w["node"] for w in world.show("after")["workers"]] == places["two"], "that machine was free"
    assert psutil.Process(pid).status() == psutil.STATUS_STOPPED
    cluster.shoal("cancel", "-y", "guest", code=0)
    cluster.shoal("wait", "one", "--for", "running", "--timeout", "60s", code=0, timeout=90)
    eventually(lambda: psutil.Process(pid).status() != psutil.STATUS_STOPPED, 60, "the same process goes on")
    assert world.pids(jobs["one"]["id"]) == pids["one"]


COUNT = "import time\nfor i in range(10**6): print('line', i, flush=True); time.sleep(0.01)"


@pytest.mark.parametrize("world", [120], indirect=True)
def test_what_a_machine_wrote_up_to_its_crash_is_there_and_the_rest_follows_when_it_returns(world):
    cluster, x = world.cluster, world.machine("x")
    await_nodes(cluster, "x")
    cluster.shoal("run", "-d", "--name", "c", "--gpus", 1, "--", sys.executable, "-c", COUNT, code=0)
    job = world.show("c")["id"]

    def shipped() -> list[int]:
        return [int(n) for n in re.findall(r"line (\d+)$", cluster.shoal("logs", "c", code=0).stdout, re.M)]

    def written() -> list[int]:
        files = sorted((x.state / "workers").glob(f"{job}.*/log*"))
        return [int(n) for path in files for n in re.findall(r"line (\d+)$", path.read_text(), re.M)]

    before = eventually(lambda: len(found := shipped()) > 100 and found, 60, "its log")
    x.crash()
    on_disk = written()
    after = shipped()
    assert after == on_disk[: len(after)], "in order, none missing"
    assert len(after) >= len(before)
    assert on_disk == list(range(len(on_disk)))
    x.boot()
    eventually(lambda: len(shipped()) >= len(on_disk), 60, "the rest")
    assert shipped()[: len(on_disk)] == on_disk


A_DAY_AHEAD = """
#define _GNU_SOURCE
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
int clock_gettime(clockid_t clock, struct timespec *found) {
    int failed = syscall(SYS_clock_gettime, clock, found);
    if (!failed && clock == CLOCK_REALTIME) found->tv_sec += 90000;
    return failed;
}
"""


@pytest.fixture
def day_ahead(tmp_path):
    """A library with which all processes of a machine believe that it is tomorrow."""
    if shutil.which("cc") is None:
        skip("NO TEST OF A WRONG CLOCK: it needs a C compiler")
    (tmp_path / "clock.c").write_text(A_DAY_AHEAD)
    library = tmp_path / "clock.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, tmp_path / "clock.c"], check=True)
    return library


#: The processes print in turn; who may print next is in a file.
IN_TURN = """
import os, pathlib, time
print("clock", time.time(), flush=True)
rank, baton = int(os.environ["RANK"]), pathlib.Path(os.environ["BATON"])
for turn in range(rank, 8, 2):
    while int(baton.read_text() or 0) != turn:
        time.sleep(0.02)
    print("turn", turn, flush=True)
    time.sleep(0.5)  # a keeper notes the time when it reads the line
    new = baton.with_suffix(f".{rank}")
    new.write_text(str(turn + 1))
    new.replace(baton)
"""


@pytest.mark.parametrize("world", [120], indirect=True)
def test_a_machine_whose_clock_is_a_day_off_is_named_and_changes_neither_logs_nor_durations(
    world, tmp_path, day_ahead
):
    cluster = world.cluster
    world.machine("right", gpus=1), world.machine("wrong", gpus=1, preload=day_ahead)
    await_nodes(cluster, "right", "wrong")
    warnings = {n["name"]: n["warnings"] for n in cluster.json("node", "ls")["items"]}
    assert "its clock is 1 day ahead of the server's" in warnings["wrong"]
    assert warnings["right"] == []

    (tmp_path / "baton").write_text("0")
    began_s = time.time()
    env = ("--env", f"BATON={tmp_path / 'baton'}")
    words = ("--gpus", 2, "--per-gpu", *env, "--", sys.executable, "-c", IN_TURN)
    cluster.shoal("run", "-d", "--name", "t", *words, code=0)
    cluster.shoal("wait", "t", "--timeout", "90s", code=0, timeout=120)
    took_s = time.time() - began_s
    job = world.show("t")
    lines = json.loads(cluster.shoal("logs", "t", "-o", "json", code=0).stdout)["items"]
    clocks = {line["rank"]: float(line["text"].split()[1]) for line in lines if "clock" in line["text"]}
    assert abs(clocks[0] - clocks[1]) > 80_000, "the clocks of the two processes differ"
    assert [line["text"] for line in lines if "turn" in line["text"]] == [f"turn {n}" for n in range(8)]
    at = [datetime.fromisoformat(line["at"]).timestamp() for line in lines]
    assert began_s - 1 < min(at)
    assert max(at) < began_s + took_s + 1
    assert 3.5 <= job["running_s"] <= took_s
    for worker in job["workers"]:
        ran = [datetime.fromisoformat(worker[when]).timestamp() for when in ("started_at", "ended_at")]
        assert 3.0 <= ran[1] - ran[0] <= took_s
