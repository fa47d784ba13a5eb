"""A whole cluster on a real Ray of several raylets: from `shoal up --engine ray` to `shoal down`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from engines.absent import need_ray
from engines.ray_cluster import RayCluster
from engines.shoal_home import ShoalHome
from shoal.server.api.models import Check

from . import on_the_path, one_owner, stories

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
UP = (
    *("--engine", "ray", "--gpus-per-node", "2", "--gpus", "2", "--idle", "5s"),
    *("--policy", "max-min"),
)


@pytest.fixture(scope="module")
def ray() -> Iterator[RayCluster]:
    need_ray()
    started = RayCluster(types=("A100", "A100"))
    yield started
    started.stop()


@pytest.fixture
def home() -> Iterator[ShoalHome]:
    directory = Path(tempfile.mkdtemp(prefix="sh-"))
    made = ShoalHome(directory / "home", dict(os.environ))
    yield made
    made.shoal("down", "-y", code=None)
    shutil.rmtree(directory)


def actors(ray: RayCluster) -> list[str]:
    """The names of all actors, asked by a process of its own: the test must not become a driver."""
    code = (
        f"import ray; ray.init(address={ray.address!r}, logging_level='error', log_to_driver=False); "
        "print(*(a['name'] for a in ray.util.list_named_actors(all_namespaces=True)))"
    )
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    ).stdout.split()


def test_jobs_get_nodes_keep_them_over_every_loss_and_return_them(ray: RayCluster, home: ShoalHome) -> None:
    at = ("--ray-address", ray.address)
    home.up(*UP, *at, "--nodes", "0..2")
    with on_the_path.overheard(home) as password:
        stories.submit_gang(home, 4, password)
        stories.the_gang_spans_machines(home, 4)
        stories.a_job_over_machines_ends_as_on_one(home, 4)
    home.train("bert", "1..4")
    home.size("bert", 4)
    home.trains_on("bert")
    stories.no_gpu_is_used_twice(home, "bert")
    assert {node for node, _ in home.gpus_of("bert").values()} == {"gpu-1", "gpu-2"}
    types = {n.name: (n.gpu_type, n.rack, n.address) for n in home.ready(2)}
    assert types == {"gpu-1": ("a100", "r1", "127.0.0.2"), "gpu-2": ("a100", "r2", "127.0.0.3")}
    stories.a_killed_agent_is_replaced(home, "bert")
    one_owner.a_killed_server_is_replaced(home, "bert")

    # The launcher dies: another one finds its actors. It returns the machines of a job that is paused, and gets others.
    (launcher,) = [p for p in home.server.children() if "shoal.engines.ray_launcher" in p.cmdline()]
    launcher.kill()
    home.trains_on("bert")
    step = stories.pause(home, "bert")
    home.until(lambda: not home.nodes() and not home.agents(), "all machines are returned")
    assert engine_check(home).status == "ok"
    stories.resume(home, "bert", step)
    home.size("bert", 4)

    # A raylet is killed: Ray loses the node, its workers run on until their lease ends, then none is alive.
    before = home.workers("bert")
    there = [pid for w, pid in before.items() if home.gpus_of("bert")[w][0] == "gpu-2"]
    with stories.logs_survive(home, "bert", "gpu-2"):
        ray.kill_node("gpu-2")
        home.size("bert", 2)
        home.trains_on("bert")
    home.until(lambda: not stories.alive(there), "no orphan is left after the lease")
    ray.add_node("gpu-2", "127.0.0.3", "A100", "r2")
    home.size("bert", 4)
    home.trains_on("bert")

    home.shoal("cancel", "-y", "bert")
    one_owner.a_suspended_gang_wakes_only_on_its_own_machine(home)
    one_owner.the_gpus_of_a_silent_machine_wait_for_its_lease(
        home, meanwhile=lambda: on_the_path.strangers_are_refused(home)
    )
    home.down()
    assert not actors(ray), "shoal down leaves no actor"
    stories.nothing_is_left(home)


def engine_check(home: ShoalHome) -> Check:
    return next(c for c in home.client.doctor().checks if c.name == "engine")


def test_without_ray_and_without_a_cluster_shoal_up_says_what_to_do(home: ShoalHome, tmp_path: Path) -> None:
    done = home.up("--engine", "ray", "--ray-address", "127.0.0.1:1", code=2)
    assert "Ray does not answer at 127.0.0.1:1" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    (tmp_path / "ray.py").write_text("raise ModuleNotFoundError(\"No module named 'ray'\")")
    home.env["PYTHONPATH"] = f"{tmp_path}:{home.env.get('PYTHONPATH', '')}"
    done = home.up("--engine", "ray", code=2)
    assert "pip install 'shoal[ray]'" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr


def test_eight_workers_have_eight_gpus_and_when_rays_head_dies_the_server_says_so(
    ray: RayCluster, home: ShoalHome
) -> None:
    """The last test here: the cluster has no head afterwards."""
    all_gpus = ("--gpus-per-node", "4", "--gpus", "4")
    home.up(*UP, *all_gpus, "--ray-address", ray.address, "--nodes", "1..8")
    command = ("sh", "-c", "echo on GPU $SHOAL_GPU; sleep 1000")
    home.shoal("run", "-d", "--name", "eight", "--gpus", 8, "--per-gpu", "--", *command)
    home.until(lambda: len(home.workers("eight")) == 8, "eight workers run")
    home.until(lambda: len(home.client.logs("eight")) == 8, "each says which GPU it has")
    stories.no_gpu_is_used_twice(home, "eight")
    home.shoal("cancel", "-y", "eight")

    home.train("bert", "1")
    home.trains_on("bert")
    ray.kill_head()
    home.trains_on("bert")
    home.until(lambda: engine_check(home).status == "error", "doctor says that Ray does not answer")
    assert "Ray" in engine_check(home).message
    home.shoal("run", "-d", "--name", "later", "--gpus", 1, "--", "true")
    assert home.shoal("ps").returncode == 0
    done = home.shoal("down", "-y", "--timeout", "100s", code=1)
    assert "could not return all machines" in done.stderr
