"""Several machines on this one, as anybody can try them: `shoal up --cluster cluster.yaml`."""

import json
import re
import sys
from pathlib import Path

import pytest
from live_cluster import Cluster, eventually

SCRIPTS = Path(__file__).with_name("scripts")
pytest.importorskip("torch")
pytestmark = pytest.mark.timeout(600)

SIX_GPUS = """\
nodes:
  - {count: 2, gpus: 2, type: fast, rack: r1, name: f}
  - {count: 1, gpus: 2, type: slow, rack: r2, name: s}
users: {ada: 1, bob: 2}
"""


@pytest.fixture
def cluster(tmp_path):
    made = Cluster(tmp_path / "home")
    yield made
    made.close()


def up(cluster: Cluster, text: str | None = None, *options: object) -> None:
    if text is not None:
        file = cluster.home.parent / "cluster.yaml"
        file.write_text(text)
        options = ("--cluster", file, *options)
    cluster.shoal("up", "--timeout", "120s", *options, code=0, timeout=150)


def train(cluster: Cluster, name: str, gpus: int, gain: float = 1.0, **how) -> None:
    command = [sys.executable, SCRIPTS / "typed.py", gain, slow_file(cluster)]
    words = ("run", "-d", "--name", name, "--gpus", gpus, "--resize", "live", "--", *command)
    cluster.shoal(*words, code=0, timeout=90, **how)


def slow_file(cluster: Cluster) -> Path:
    """While it exists, steps take four times as long."""
    return cluster.home.parent / "slow"


def fixed(cluster: Cluster, name: str, gpus: int) -> None:
    """A job that holds its GPUs and uses no time of the processors."""
    cluster.shoal("run", "-d", "--name", name, "--gpus", gpus, "--", "sleep", "1000", code=0, timeout=90)
    cluster.shoal("wait", name, "--for", "running", "--timeout", "60s", code=0, timeout=90)


def show(cluster: Cluster, name: str) -> dict:
    return cluster.json("show", name)


def nodes_of(cluster: Cluster, name: str) -> list[str]:
    """The node of each worker that trains."""
    return sorted(w["node"] for w in show(cluster, name)["workers"] if w["state"] == "active")


def await_steps(cluster: Cluster, *names: str, after: int = 0) -> None:
    for name in names:
        eventually(lambda name=name: (show(cluster, name)["step"] or 0) > after, 90, f"a step of {name}")


def end(cluster: Cluster, *names: str) -> None:
    cluster.shoal("cancel", "-y", "--grace", "0s", *names, code=0)
    for name in names:
        cluster.shoal("wait", name, "--timeout", "60s", timeout=90)


def test_a_cluster_file_becomes_nodes_that_a_job_spans_and_down_leaves_nothing(cluster):
    up(cluster, SIX_GPUS, "--policy", "max-min")
    nodes = cluster.json("node", "ls")["items"]
    found = [(n["name"], n["state"], n["gpu_type"], n["gpus"], n["rack"], n["address"]) for n in nodes]
    assert sorted(found) == [
        ("f0", "ready", "fast", 2, "r1", "127.0.0.2"),
        ("f1", "ready", "fast", 2, "r1", "127.0.0.3"),
        ("s", "ready", "slow", 2, "r2", "127.0.0.4"),
    ]
    assert cluster.json("user", "show", "bob")["tickets"] == 2
    train(cluster, "wide", 4)
    await_steps(cluster, "wide")
    assert nodes_of(cluster, "wide") == ["f0", "f0", "f1", "f1"]
    eventually(
        lambda: "at 127.0.0.3" in cluster.shoal("logs", "wide", code=0).stdout, what="the other node's log"
    )

    pids = agents(cluster)
    cluster.kill_server()
    up(cluster)
    assert agents(cluster) == pids, "the agents outlive the server, and the file need not be given again"
    await_steps(cluster, "wide", after=show(cluster, "wide")["step"] or 0)

    cluster.shoal("down", "-y", code=0, timeout=120)
    assert [p.cmdline() for p in cluster.processes()] == []


def steps_of(cluster: Cluster, name: str) -> list[tuple[int, str]]:
    """Each step in the log of a job, with the type of GPU that it was made on."""
    log = cluster.shoal("logs", name, code=0).stdout
    return [(int(step), gpu_type) for step, gpu_type in re.findall(r"step (\d+) at \S+ on (\w+)", log)]


def is_whole(steps: list[tuple[int, str]]) -> bool:
    """Whether every step is there. The last lines of a machine may be on their way."""
    found = sorted(step for step, _ in steps)
    assert len(found) == len(set(found)), f"steps were made twice: {found}"
    return found == list(range(found[0], found[0] + len(found))) and found[0] <= 1


def worker_pids(cluster: Cluster, name: str) -> set[int]:
    return {w["pid"] for w in show(cluster, name)["workers"] if w["state"] == "active"}


def agents(cluster: Cluster) -> dict[str, int]:
    files = (cluster.home / "nodes").glob("*/process.json")
    return {path.parent.name: json.loads(path.read_text())["pid"] for path in files}


def test_a_number_of_gpus_in_place_of_the_file_ends_the_agents(cluster):
    up(cluster, "nodes: [{gpus: 1, name: only}]\n")
    cluster.kill_server()
    assert len(agents(cluster)) == 1
    up(cluster, None, "--gpus", 1)
    eventually(
        lambda: not any("agent" in p.cmdline() for p in cluster.processes()), what="the end of the agent"
    )
    ready = lambda: [n["name"] for n in cluster.json("node", "ls")["items"] if n["state"] == "ready"]  # noqa: E731
    eventually(lambda: ready() == ["local"], 60, "only this machine")


BAD = {
    "an unknown key": ("nodes:\n  - {count: 2, gpu: 4}\n", "2: gpu: unknown key; did you mean 'gpus'?"),
    "no GPUs": ("nodes:\n  - {gpus: 2}\n  - {gpus: 0}\n", "3: gpus: must be at least 1"),
    "one name twice": (
        "nodes:\n- {gpus: 1, name: a}\n- {gpus: 1, name: a}\n",
        "3: name: another node is called 'a'",
    ),
    "no nodes": ("users: {ada: 1}\n", "1: nodes: this key is missing"),
    "no YAML": ("nodes: [\n", "is not valid YAML"),
    "more nodes than a machine can run": (
        "nodes:\n  - {count: 65, gpus: 1}\n",
        "nodes: at most 64 nodes run on",
    ),
    "a name that no agent may have": (
        "nodes:\n  - {gpus: 1}\n  - {gpus: 1, name: rack one}\n",
        "name: 'rack one' is not a name of a node",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_wrong_cluster_file_is_refused_with_its_line_and_field(cluster, case):
    text, words = BAD[case]
    file = cluster.home.parent / "cluster.yaml"
    file.write_text(text)
    done = cluster.shoal("up", "--cluster", file, code=2, timeout=90)
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"shoal: {file}:"), line
    assert words in line
    assert cluster.processes() == []


def test_options_that_contradict_a_cluster_file_are_refused(cluster, tmp_path):
    done = cluster.shoal("up", "--cluster", tmp_path / "none.yaml", code=2, timeout=90)
    assert "none.yaml: there is no such file" in done.stderr
    (tmp_path / "cluster.yaml").write_text("nodes: [{gpus: 1}]\n")
    done = cluster.shoal("up", "--cluster", tmp_path / "cluster.yaml", "--gpus", 2, code=2, timeout=90)
    assert done.stderr == "shoal: --cluster has the GPUs of all nodes: leave --gpus out\n"
    slurm = ("--engine", "slurm", "--partition", "gpu")
    done = cluster.shoal("up", "--cluster", tmp_path / "cluster.yaml", *slurm, code=2, timeout=90)
    assert "shoal up --engine none --cluster FILE" in done.stderr


TWO_TYPES = """\
nodes:
  - {gpus: 1, type: fast, name: fast}
  - {gpus: 2, type: slow, name: slow}
users: {ada: 1, bob: 1}
"""


#: Short quanta, and visits to each type to measure jobs there.
QUICK = ("quantum_s=5", "profiling=user", "visit_s=15", "balance_s=5", "rest_s=5")


def test_users_whose_jobs_gain_unequally_trade_gpus_and_their_jobs_change_machines(cluster):
    up(
        cluster,
        TWO_TYPES,
        "--policy",
        "gandiva-fair",
        *(word for option in QUICK for word in ("--policy-option", option)),
    )
    jobs = {"ada1": 4.0, "ada2": 4.0, "bob1": 1.1, "bob2": 1.1}
    for name, gain in jobs.items():
        user = name[:3]
        cluster.shoal("user", "set", user, "--role", "admin", code=0)  # jobs run under the server's account
        token = cluster.home.parent / f"{user}.token"
        token.write_text(cluster.shoal("token", "create", "--user", user, code=0).stdout)
        train(cluster, name, 1, gain, env={"SHOAL_TOKEN_FILE": str(token)})

    def traded() -> dict[str, dict[str, float]]:
        return {s["user"]: s["traded_by_type_gpu_s"] for s in cluster.json("shares")["items"]}

    eventually(lambda: traded()["ada"].get("fast", 0) > 1, 240, "a trade")
    found = traded()
    assert found["ada"]["fast"] > 0 > found["ada"]["slow"], "ada buys fast GPUs and pays with slow ones"
    assert found["bob"]["fast"] < 0 < found["bob"]["slow"]
    shown = {line.split()[0]: line for line in cluster.shoal("shares", code=0).stdout.splitlines()}
    assert re.search(r"\+\S+ fast, -\S+ slow$", shown["ada"]), shown
    assert re.search(r"\+\S+ slow, -\S+ fast$", shown["bob"]), shown

    # A job that trained on both types was moved with its state: no step is lost or made twice.
    def types_of(name: str) -> set[str]:
        return {gpu_type for _, gpu_type in steps_of(cluster, name)}

    moved = eventually(lambda: [n for n in jobs if len(types_of(n)) > 1], 60, "a migration")
    reached = {name: show(cluster, name)["step"] or 0 for name in jobs}
    for name in moved:
        await_steps(cluster, name, after=reached[name])
        assert show(cluster, name)["restarts"] == 0
        eventually(lambda name=name: is_whole(steps_of(cluster, name)), 60, f"the log of each step of {name}")
    # The same jobs under the policy that resizes: it gives every user its part of both types too.
    reached = {name: show(cluster, name)["step"] or 0 for name in jobs}
    cluster.shoal("policy", "set", "fair-afs", "--option", "quantum_s=5", code=0)
    before = traded()
    for name in jobs:
        await_steps(cluster, name, after=reached[name])
    eventually(lambda: traded()["ada"]["fast"] > before["ada"]["fast"] + 1, 120, "a trade under fair-afs")
    found = traded()
    assert found["ada"]["slow"] < before["ada"]["slow"], "ada pays with slow GPUs"
    assert found["bob"]["fast"] < before["bob"]["fast"]


#: Another command than that of the other jobs, which is as fast.
EVEN = 1.01
THREE_NODES = "nodes: [{count: 3, gpus: 2, type: v100, name: n}]\n"


def test_each_placement_of_the_simulator_places_and_moves_jobs_that_train(cluster):
    # Keep and pack: a pair is on one node, apart from the single. Draining the pair's node moves it with its state.
    up(cluster, THREE_NODES, "--policy", "max-min")
    train(cluster, "single", 1)
    await_steps(cluster, "single")
    train(cluster, "pair", 2)
    await_steps(cluster, "pair", after=3)
    (first,), (alone,) = set(nodes_of(cluster, "pair")), nodes_of(cluster, "single")
    assert first != alone
    before = show(cluster, "pair")["step"]
    cluster.shoal("node", "drain", "-y", first, code=0)
    eventually(lambda: first not in nodes_of(cluster, "pair"), 60, "the migration")
    await_steps(cluster, "pair", after=before)
    (second,) = set(nodes_of(cluster, "pair"))
    assert second not in (first, alone), "together on the free node"
    moved = show(cluster, "pair")
    assert (moved["restarts"], moved["state"]) == (0, "running")
    cluster.shoal("node", "uncordon", first, code=0)

    # Optimus' placement, with its policy.
    cluster.shoal("policy", "set", "optimus", code=0)
    train(cluster, "opt", 2, EVEN)
    await_steps(cluster, "opt")
    eventually(lambda: measured_on(cluster, "opt", 2), 60, "its speed on one node")
    assert set(nodes_of(cluster, "opt")) == {first}
    end(cluster, "opt")

    # Liquid's best fit, with a server that takes over what runs. Nothing that runs is disturbed.
    workers = {name: worker_pids(cluster, name) for name in ("single", "pair")}
    cluster.shoal("down", "-y", "--keep-jobs", code=0, timeout=120)
    up(cluster, None, "--placement", "liquid", "--policy", "fifo")
    train(cluster, "liq", 2)
    await_steps(cluster, "liq")
    active = [
        w for name in (*workers, "liq") for w in show(cluster, name)["workers"] if w["state"] == "active"
    ]
    taken = [(w["node"], w["gpu"]) for w in active]
    assert len(taken) == len(set(taken)) == 5, "no GPU is used twice"
    assert {name: worker_pids(cluster, name) for name in ("single", "pair")} == workers

    # Its genetic algorithm places jobs that start together, when a job that had all GPUs ends.
    end(cluster, "single", "pair", "liq")
    cluster.shoal("down", "-y", "--keep-jobs", code=0, timeout=120)
    up(cluster, None, "--placement", "liquid-batch:max_plans=200", "--policy", "fifo")
    fixed(cluster, "wide", 6)
    train(cluster, "b2", 2)
    train(cluster, "b1", 1)
    assert [show(cluster, name)["state"] for name in ("b2", "b1")] == ["pending", "pending"]
    end(cluster, "wide")
    await_steps(cluster, "b2", "b1")
    assert len(set(nodes_of(cluster, "b2"))) == 1
    assert nodes_of(cluster, "b1")

    # A job that spans two nodes moves onto one when there is room: others of its command were faster on one node.
    eventually(lambda: measured_on(cluster, "b2", 2), 60, "the speed on one node")
    end(cluster, "b2", "b1")
    cluster.shoal("down", "-y", "--keep-jobs", code=0, timeout=120)
    up(cluster, None, "--placement", "moving:horizon_s=60:move_s=20", "--policy", "max-min")
    for name, gpus in {"a": 1, "b": 1, "c": 1, "d": 2}.items():
        fixed(cluster, name, gpus)
    end(cluster, "b")  # one GPU is free on the node of a, and one on that of c

    # Not if that does not pay: others of its command were not much faster on one node.
    train(cluster, "even", 2, EVEN)
    await_steps(cluster, "even", after=10)
    eventually(lambda: (show(cluster, "even")["speed"] or 0) > 2, 90, "its speed on two nodes")
    placed = show(cluster, "even")["workers"]
    assert len({w["node"] for w in placed}) == 2
    end(cluster, "a")
    await_steps(cluster, "even", after=show(cluster, "even")["step"] + 4)
    assert [w["id"] for w in show(cluster, "even")["workers"]] == [w["id"] for w in placed]
    fixed(cluster, "a", 1)
    end(cluster, "even")

    slow_file(cluster).touch()
    train(cluster, "apart", 2)
    eventually(lambda: 0 < (show(cluster, "apart")["speed"] or 0) < 2, 90, "its speed on two nodes")
    assert len(set(nodes_of(cluster, "apart"))) == 2
    reached = show(cluster, "apart")["step"]
    end(cluster, "a")
    eventually(lambda: len(set(nodes_of(cluster, "apart"))) == 1, 60, "the move onto one node")
    slow_file(cluster).unlink()
    await_steps(cluster, "apart", after=reached + 4)
    assert show(cluster, "apart")["restarts"] == 0

    # Split stride: a gang that spans two nodes takes turns with small jobs, and all of them get their share.
    end(cluster, "c", "d", "apart")
    cluster.shoal("node", "drain", "-y", "n2", code=0)
    cluster.shoal("policy", "set", "gandiva-fair", "--option", "quantum_s=3", code=0)
    jobs = {"gang": 4, "small1": 1, "small2": 1}
    for name, gpus in jobs.items():
        train(cluster, name, gpus)
    reached = dict.fromkeys(jobs, 0)
    for _ in range(2):
        for name, step in reached.items():
            words = cluster, name, jobs[name], step
            eventually(lambda words=words: trains_whole(*words), 120, f"a turn of {name}")
        reached = {name: show(cluster, name)["step"] for name in jobs}
    turns = [
        e["data"] for e in cluster.json("events", "--type", "job.target")["items"] if e["job_name"] == "gang"
    ]
    assert {turn["to_gpus"] for turn in turns} == {0, 4}, (
        "it has all its GPUs or none, and others have a turn"
    )
    for name in jobs:
        eventually(lambda name=name: is_whole(steps_of(cluster, name)), 60, f"the log of each step of {name}")


TWO_RACKS = """\
nodes:
  - {count: 2, gpus: 1, type: v100, rack: r1, name: a}
  - {count: 2, gpus: 1, type: v100, rack: r2, name: b}
"""
#: Those that know racks. Optimus takes the freest nodes wherever they are.
PLACEMENTS = {
    "keep-and-pack": ("--policy", "max-min"),
    "liquid": ("--policy", "fifo", "--placement", "liquid"),
    "liquid-batch": ("--policy", "fifo", "--placement", "liquid-batch:max_plans=200"),
}


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_job_of_two_nodes_stays_in_one_rack(cluster, placement):
    """One GPU is taken: a job of two that gets the next free ones is in two racks."""
    up(cluster, TWO_RACKS, *PLACEMENTS[placement])
    fixed(cluster, "single", 1)
    fixed(cluster, "pair", 2)
    rack_of = {n["name"]: n["rack"] for n in cluster.json("node", "ls")["items"]}
    (alone,) = nodes_of(cluster, "single")
    nodes = nodes_of(cluster, "pair")
    assert len(set(nodes)) == 2
    assert {rack_of[node] for node in nodes} == {"r1", "r2"} - {rack_of[alone]}


def trains_whole(cluster: Cluster, name: str, gpus: int, after: int) -> bool:
    """Whether the job has made steps after this one. Its workers train all together, at each moment, or not at all."""
    job = show(cluster, name)
    nodes = [w["node"] for w in job["workers"] if w["state"] == "active"]
    assert len(nodes) in (0, gpus), nodes
    assert len(set(nodes)) in (0, -(-gpus // 2)), nodes
    return (job["step"] or 0) > after


def measured_on(cluster: Cluster, name: str, gpus: int) -> bool:
    """Whether the speed of a job's model with so many GPUs is measured."""
    return any(p["gpus"] == gpus and p["measured"] for p in cluster.json("profile", name)["points"])
