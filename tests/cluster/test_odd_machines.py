"""Machines that are not as others: an address that is not their own, a wrong clock, no torch. No root is needed."""

import contextlib
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from live_cluster import Cluster, eventually
from machines import await_nodes

SCRIPTS = Path(__file__).with_name("scripts")
pytest.importorskip("torch")
pytestmark = pytest.mark.timeout(600)


class Agents:
    """Agents as plain processes, each with variables of its own."""

    def __init__(self, cluster: Cluster, directory: Path) -> None:
        self.cluster, self.directory = cluster, directory
        self.processes: list[subprocess.Popen] = []

    def start(self, name: str, *words: object, gpus: int = 2, env: dict[str, str] | None = None) -> None:
        state = self.directory / name
        state.mkdir()
        made = self.cluster.json("node", "join-token", "create")
        (state / "token").write_text(made["token"])
        command = [sys.executable, "-m", "shoal.cli.main", "agent", "--join", made["address"]]
        command += ["--token-file", state / "token", "--name", name, "--gpus", gpus, "--state", state, *words]
        with (state / "log").open("w") as log:
            self.processes.append(
                subprocess.Popen(
                    list(map(str, command)), env=self.cluster.env | (env or {}), stdout=log, stderr=log
                )
            )

    def close(self) -> None:
        for process in self.processes:
            process.send_signal(signal.SIGTERM)
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(30)
            process.kill()
            process.wait()


@pytest.fixture
def cluster(tmp_path):
    made = Cluster(tmp_path / "home")
    made.shoal("up", "--gpus", 0, "--policy", "max-min", "--timeout", "120s", code=0, timeout=150)
    yield made
    made.close()


@pytest.fixture
def agents(cluster, tmp_path):
    made = Agents(cluster, tmp_path)
    yield made
    for job in cluster.json("ps")["items"]:
        cluster.shoal("cancel", "-y", "--grace", "0s", job["id"], timeout=90)
    eventually(lambda: cluster.json("ps")["items"] == [], 60, "the end of the jobs")
    made.close()


def show(cluster: Cluster, name: str) -> dict:
    return cluster.json("show", name)


def test_live_jobs_train_where_the_machine_does_not_have_the_address_that_others_connect_to(
    cluster, agents, tmp_path
):
    agents.start("nat", "--address", "192.0.2.7", "--bind", "127.0.0.4")
    await_nodes(cluster, "nat")
    command = [sys.executable, SCRIPTS / "train.py", 100_000, tmp_path / "fast"]
    cluster.shoal("run", "-d", "--name", "t", "--gpus", "1..2", "--", *command, code=0)
    cluster.shoal("wait", "t", "--for", "size=2", "--timeout", "60s", code=0, timeout=90)
    step = show(cluster, "t")["step"] or 0
    eventually(lambda: (show(cluster, "t")["step"] or 0) > step + 2, 60, "steps of both workers")
    assert "at 192.0.2.7" in cluster.shoal("logs", "t", code=0).stdout


def test_doctor_names_a_machine_whose_address_leads_elsewhere(cluster, agents):
    agents.start("right", "--address", "127.0.0.2")
    agents.start("wrong", "--address", "127.0.0.99", "--bind", "127.0.0.3")
    await_nodes(cluster, "right", "wrong")

    def checked() -> dict | None:
        checks = json.loads(cluster.shoal("doctor", "-o", "json").stdout)["checks"]
        return next((c for c in checks if c["name"] == "between machines"), None)

    found = eventually(checked, 60, "the answers of both agents")
    text = "workers on right cannot connect to it at 127.0.0.99: connection refused"
    assert (found["status"], found["message"]) == ("warning", f"wrong: {text}")
    assert "--address" in found["hint"]
    warnings = {n["name"]: n["warnings"] for n in cluster.json("node", "ls")["items"]}
    assert text in warnings["wrong"]
    assert text not in warnings["right"]


#: As if torch were not installed: the agent finds no version of it, and no script can import it.
NO_TORCH = """
import importlib.metadata, sys
sys.modules["torch"] = None
real = importlib.metadata.distribution
def distribution(name):
    if name == "torch":
        raise importlib.metadata.PackageNotFoundError(name)
    return real(name)
importlib.metadata.distribution = distribution
"""


def test_a_machine_without_torch_is_named_and_its_jobs_fail_with_a_reason_while_others_go_on(
    cluster, agents, tmp_path
):
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(NO_TORCH)
    agents.start("full", gpus=1)
    await_nodes(cluster, "full")
    fast = tmp_path / "fast"
    command = [sys.executable, SCRIPTS / "train.py", 1_000_000, fast]
    cluster.shoal("run", "-d", "--name", "old", "--gpus", "1..2", "--", *command, code=0)
    eventually(lambda: show(cluster, "old")["step"], 60, "its first steps")
    agents.start("bare", gpus=2, env={"PYTHONPATH": str(site)})
    await_nodes(cluster, "bare")
    warnings = {n["name"]: n["warnings"] for n in cluster.json("node", "ls")["items"]}
    none = "its Python has no torch: jobs that use shoal.torch fail there"
    assert warnings == {"full": [], "bare": [none]}

    # It grows onto that node in vain, and trains on. A new job that gets this node only fails, and says why.
    missing = "shoal.torch needs PyTorch on node bare"
    eventually(lambda: missing in cluster.shoal("why", "old").stdout, 60, "the reason why it does not grow")
    cluster.shoal("run", "-d", "--name", "new", "--gpus", "1..2", "--", *command, code=0)
    eventually(lambda: show(cluster, "new")["state"] == "failed", 60, "the end of the job")
    assert missing in show(cluster, "new")["message"]
    cluster.shoal("run", "-d", "--name", "other", "--gpus", 1, "--", "echo", "fine", code=0)
    cluster.shoal("wait", "other", "--timeout", "60s", code=0, timeout=90)
    step = show(cluster, "old")["step"]
    eventually(lambda: show(cluster, "old")["step"] > step, 60, "further steps")
    assert show(cluster, "old")["restarts"] == 0
