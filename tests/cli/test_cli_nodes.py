"""Machines that join and leave: `shoal node add`, `shoal node join-token`, `shoal node rm`."""

import re
import subprocess
import sys

import psutil
import pytest
from live_cluster import eventually

from shoal.cli.node import HEAD, _row
from shoal.server.api.models import NodeStatus

FAKE_SSH = """\
#!/bin/sh
# As ssh: HOST, then a command for the shell of that machine. Its home is another one.
[ "$1" = -- ] && shift
echo "$1" > "{host}"
HOME="{home}" exec sh -c "$2"
"""


@pytest.fixture
def machine(live, tmp_path):
    """A host `ada@gpu7.lab` that a program called ssh reaches: its home directory. Its agents end with the test."""
    ssh, home = tmp_path / "bin" / "ssh", tmp_path / "gpu7"
    ssh.parent.mkdir()
    home.mkdir()
    ssh.write_text(FAKE_SSH.format(host=tmp_path / "host", home=home))
    ssh.chmod(0o755)
    yield home
    for process in agents(home):
        process.kill()
        process.wait(10)
    for node in nodes(live):
        if node != "local":
            eventually(lambda node=node: nodes(live).get(node) == "lost", 60, f"the loss of {node}")
            live.shoal("node", "rm", node, code=0)


def agents(home) -> list[psutil.Process]:
    state = f"--state {home}"
    return [p for p in psutil.process_iter() if state in " ".join(_argv(p))]


def _argv(process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def nodes(live) -> dict[str, str]:
    return {n["name"]: n["state"] for n in live.json("node", "ls")["items"]}


def with_ssh(live, machine) -> dict[str, str]:
    return {"PATH": f"{machine.parent / 'bin'}:{live.env['PATH']}", "XDG_STATE_HOME": ""}


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({"engine": "job 4711 is up on g1"}, "job 4711 is up on g1"),
        (
            {"why": "no message for 15 s", "engine": "job 4711 is up on g1 (node g1 is down*)"},
            "no message for 15 s; job 4711 is up on g1 (node g1 is down*)",
        ),
        (
            {"warnings": ["no torch", "a wrong clock"], "engine": "job 4711 is up on g1"},
            "no torch; a wrong clock; job 4711 is up on g1",
        ),
        (
            {"why": "taken back: job 4711 is pending (Priority)", "engine": "job 4711 is pending (Priority)"},
            "taken back: job 4711 is pending (Priority)",
        ),
    ],
)
def test_a_row_of_node_ls_has_the_reason_the_warnings_and_what_the_engine_says(fields, shown):
    node = NodeStatus(name="slurm-1", gpu_type="a100", gpus=4, used=0, virtual=False, **fields)
    assert dict(zip(HEAD, _row(node)))["WHY"] == shown


@pytest.mark.parametrize("way", ["printed", "run"])
def test_a_machine_joins_by_the_command_that_node_add_prints_or_runs_and_is_removed_when_lost(
    live, machine, way
):
    env = with_ssh(live, machine)
    words = (
        "node",
        "add",
        "ada@gpu7.lab",
        "--gpus",
        2,
        "--type",
        "k80",
        "--rack",
        "r 1",
        "--python",
        sys.executable,
    )
    if way == "run":
        done = live.shoal(*words, "--ssh", env=env, code=0)
        assert done.stdout == ""
        assert "gpu7 was started" in done.stderr
    else:
        done = live.shoal(*words, code=0)
        assert "ada@gpu7.lab" in done.stdout
        by_hand = (
            r"run `shoal agent --join \S+ --name gpu7 --type k80 --rack 'r 1' --gpus 2 --token-file FILE`"
        )
        assert re.search(by_hand, done.stderr)
        assert not agents(machine), "it was only printed"
        subprocess.run(["sh", "-c", done.stdout], env=live.env | env, check=True, timeout=60)
    eventually(lambda: nodes(live).get("gpu7") == "ready", 60, "the node")
    assert (machine.parent / "host").read_text() == "ada@gpu7.lab\n"
    node = live.json("node", "show", "gpu7")
    assert (node["gpus"], node["gpu_type"], node["rack"]) == (2, "k80", "r 1")
    (agent,) = agents(machine)
    secret = (machine / ".local/state/shoal-agent/gpu7/join-token").read_text().strip()
    assert secret.startswith("shoal-join:")
    assert secret not in " ".join(agent.cmdline()), "other users of the machine can see arguments"

    done = live.shoal("node", "rm", "gpu7")
    assert done.returncode == 5
    assert "gpu7 is ready, and only a node that is lost can be removed" in done.stderr
    agent.terminate()
    eventually(lambda: nodes(live).get("gpu7") == "lost", 60, "the end of the node")
    live.shoal("node", "rm", "gpu7", code=0)
    assert "gpu7" not in nodes(live)
    assert live.shoal("node", "rm", "gpu7").returncode == 3


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("echo 'ssh: Could not resolve hostname gpu7' >&2; exit 255", "Could not resolve hostname gpu7"),
        (None, "ssh is not installed here; leave --ssh out"),
    ],
)
def test_ssh_that_fails_is_said_in_one_line(live, tmp_path, script, words):
    if script is not None:
        (tmp_path / "ssh").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "ssh").chmod(0o755)
    done = live.shoal(
        "node", "add", "gpu7", "--ssh", env={"PATH": str(tmp_path) if script is None else f"{tmp_path}:/bin"}
    )
    assert done.returncode == 2, done.stderr
    assert words in done.stderr
    assert done.stderr.count("\n") == 1


def test_join_tokens_are_shown_once_listed_without_their_text_and_removed(live):
    made = live.shoal("node", "join-token", "create", "--expires", "10m", code=0)
    (token,) = made.stdout.split()
    assert token.startswith("shoal-join:")
    assert "shoal agent --join 127.0.0.1:" in made.stderr
    token_id = made.stderr.split("join token ")[1].split(",")[0]
    shown = live.shoal("node", "join-token", "ls", code=0).stdout
    assert token_id in shown
    assert token not in shown
    assert token.rpartition(":")[2] not in live.shoal("node", "join-token", "ls", "-o", "json", code=0).stdout
    live.shoal("node", "join-token", "rm", token_id, code=0)
    assert token_id not in live.shoal("node", "join-token", "ls", code=0).stdout
    assert live.shoal("node", "join-token", "rm", token_id).returncode == 3
    assert live.shoal("node", "join-token", "create", "--expires", "soon").returncode == 2
