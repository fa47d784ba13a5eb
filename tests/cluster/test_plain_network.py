"""Between plain machines: a broken network, a listener on the path, and an upload to a machine that shares nothing."""

import json
import os
import re
import socket
import sys
from pathlib import Path

import pytest
from live_cluster import eventually
from machines import World, alive, await_nodes, needs_namespaces
from network import Listener, Relay, Wires

from engines.absent import skip
from shoal.agents.join_tokens import hash_secret

from . import on_the_path

SCRIPTS = Path(__file__).with_name("scripts")
pytestmark = needs_namespaces


def states(cluster) -> dict[str, str]:
    return {n["name"]: n["state"] for n in cluster.json("node", "ls")["items"]}


@pytest.mark.parametrize("world", [12], indirect=True)
def test_over_a_broken_network_no_gpu_has_two_owners_whether_it_heals_early_or_late(world):
    cluster = world.cluster
    relay = Relay(cluster.json("node", "join-token", "create")["address"])
    x = world.machine("x", gpus=1, join=relay.address)
    await_nodes(cluster, "x")
    ids = {}
    for name in ("first", "next"):
        cluster.shoal("run", "-d", "--name", name, "--gpus", 1, "--", "sleep", "1000", code=0)
        ids[name] = world.show(name)["id"]
    (pid,) = eventually(lambda: list(x.workers(ids["first"]).values()), what="its process")
    assert world.show("next")["state"] == "pending"

    def one_owner() -> bool:
        """The agent itself works all the time: it would start what the server asks for."""
        owners = [name for name in ids if x.workers(ids[name])]
        assert len(owners) <= 1, owners
        return True

    # It heals before the lease ends: the worker went on, and nobody else has its GPU.
    relay.cut()
    eventually(lambda: one_owner() and states(cluster)["x"] == "unreachable", 60, "the broken network")
    assert alive(pid)
    assert world.show("next")["state"] == "pending"
    relay.heal()
    eventually(lambda: one_owner() and states(cluster)["x"] == "ready", 60, "the return")
    eventually(lambda: one_owner() and world.show("first")["state"] == "running", 60, "the first job")
    assert x.workers(ids["first"]) == {f"{ids['first']}.0": pid}, "the same process"

    # It heals after the lease: the keeper has ended the worker, and the GPU is free again.
    relay.cut()
    eventually(lambda: one_owner() and states(cluster)["x"] == "lost", 90, "the end of the lease")
    assert not alive(pid), "when its GPU counts as free, no worker can be alive there"
    relay.heal()
    eventually(lambda: one_owner() and any(x.workers(i) for i in ids.values()), 90, "the next owner")
    assert not alive(pid)
    relay.close()


@pytest.fixture
def wires():
    made = Wires()
    why_not = made.open()
    if why_not:
        skip(f"NO TEST OF A MACHINE WITHOUT A NETWORK: {why_not}")
    yield made
    made.close()


@pytest.fixture
def wired(tmp_path, wires):
    """A server that machines reach over wires."""
    made = World(tmp_path, lease_s=120, advertise=wires.address)
    yield made
    made.close()


def test_a_job_trains_on_while_a_machine_is_silent_and_uses_it_again_when_it_is_back(wired, wires):
    cluster = wired.cluster
    (near, x_address), (far, y_address) = wires.lay(), wires.lay()
    wired.machine("x", x_address, network=near)
    y = wired.machine("y", y_address, network=far)
    await_nodes(cluster, "x", "y")
    train = [sys.executable, SCRIPTS / "train.py", 1500, wired.directory / "fast"]
    cluster.shoal("run", "-d", "--name", "t", "--gpus", "1..4", "--", *train, code=0)
    wired.await_size("t", 4)
    job = wired.show("t")["id"]
    there = y.workers(job)
    assert len(there) == 2

    # No connection is closed: the others have to notice the silence.
    wires.cut(far)
    wired.await_step_after("t", wired.step("t") + 3)
    assert {w["node"] for w in wired.show("t")["workers"] if w["state"] == "active"} == {"x"}
    assert all(map(alive, there.values())), "they cannot know that they are not wanted any more"
    assert states(cluster)["y"] != "lost", "its lease has not ended"
    wires.heal(far)
    wired.await_size("t", 4)
    eventually(lambda: not any(map(alive, there.values())), 60, "the end of the old workers")
    assert wired.show("t")["restarts"] == 0


@pytest.mark.parametrize("world", [120], indirect=True)
def test_who_listens_on_the_path_learns_no_secret_and_can_repeat_nothing(world):
    cluster = world.cluster
    made = cluster.json("node", "join-token", "create")
    host, _, port = made["address"].rpartition(":")
    listener = Listener(int(port))
    machine = world.machine("x", gpus=3)
    await_nodes(cluster, "x")
    value = "hunter2-" + os.urandom(8).hex()
    # The worker prints another word, so that only the transport could give the value away.
    told = "import os, time; print(len(os.environ['PASSWORD']), flush=True); time.sleep(1000)"
    job = {"name": "secretive", "gpus": 1, "env": {"PASSWORD": value}, "workdir": "/tmp"}
    job["command"] = [sys.executable, "-c", told]
    (world.directory / "job.yaml").write_text(json.dumps(job))
    cluster.shoal("submit", "-d", "-y", "-f", world.directory / "job.yaml", code=0)
    eventually(lambda: str(len(value)) in cluster.shoal("logs", "secretive", code=0).stdout, what="its log")
    train = [sys.executable, SCRIPTS / "train.py", 1500, world.directory / "fast"]
    cluster.shoal("run", "-d", "--name", "live", "--gpus", 2, "--resize", "live", "--", *train, code=0)
    eventually(lambda: (world.show("live")["step"] or 0) > 1, 60, "a worker's connection")
    with socket.create_connection((host, int(port))) as plain:  # what is not encrypted is seen
        plain.sendall(b"in the clear")
        eventually(lambda: b"in the clear" in listener.everything(), what="the listener")
    listener.close()
    seen = listener.everything()
    credential = (machine.state / "credential").read_text().strip()
    token_secret = machine.token.read_text().strip().rpartition(":")[2]
    job_key = cluster.home / "jobs" / str(world.show("live")["id"]) / "secret"
    of_job = job_key.read_bytes().split(b"\n")[0]
    for secret in (value, credential, token_secret, hash_secret(credential), "PASSWORD", "train.py"):
        assert secret.encode() not in seen, "a secret is in the clear"
    assert of_job not in seen
    assert bytes.fromhex(of_job.decode()) not in seen

    # The bytes of each connection, sent once more, are no connection: TLS has other keys.
    recorded = [data for data in listener.to_port() if data != b"in the clear"]
    assert len(recorded) >= 2, "the agent and the worker"
    on_the_path.nothing_can_be_repeated(host, int(port), recorded)
    on_the_path.only_its_secret_lets_an_agent_in(host, int(port), "x", credential, lambda: refusals(cluster))
    assert states(cluster) == {"x": "ready"}
    assert world.show("secretive")["state"] == "running"

    # An agent with another secret and without a token is told so, and is not the node.
    (machine.state / "credential").write_text("0" * len(credential))
    machine.token.unlink()
    machine.kill_agent()
    eventually(lambda: "does not know this agent" in (machine.state / "log").read_text(), 60, "the refusal")
    assert states(cluster)["x"] != "ready"


def refusals(cluster) -> int:
    return len(re.findall("refused a connection", (cluster.home / "server.log").read_text()))


@pytest.mark.parametrize("world", [120], indirect=True)
def test_an_uploaded_directory_reaches_a_machine_that_cannot_see_it(world, tmp_path):
    cluster, directory = world.cluster, tmp_path / "project"
    (directory / "data").mkdir(parents=True)
    (directory / "train.py").write_text("print('weights', open('data/weights.txt').read(), flush=True)\n")
    (directory / "data" / "weights.txt").write_text("forty-two")
    (directory / "huge.bin").write_bytes(b"\0" * 1000)
    (directory / ".gitignore").write_text("*.bin\n")
    (directory / "list.py").write_text("import os; print('files', sorted(os.listdir('.')), flush=True)\n")
    world.machine("x", hidden=(directory,))
    await_nodes(cluster, "x")
    words = ("run", "--gpus", 1)
    done = cluster.shoal(
        *words, "--name", "seen", "--", sys.executable, "train.py", cwd=directory, timeout=120
    )
    assert done.returncode == 100, "without the upload there is no such directory on that machine"
    done = cluster.shoal(
        *words,
        "--name",
        "up",
        "--upload",
        "--",
        sys.executable,
        "train.py",
        cwd=directory,
        code=0,
        timeout=120,
    )
    assert "weights forty-two" in done.stdout
    done = cluster.shoal(
        *words,
        "--name",
        "ls",
        "--upload",
        "--",
        sys.executable,
        "list.py",
        cwd=directory,
        code=0,
        timeout=120,
    )
    assert "files ['.gitignore', 'data', 'list.py', 'train.py']" in done.stdout
