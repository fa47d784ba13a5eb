"""Machines from a real Ray cluster: a head and two raylets of 4 GPUs each."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shoal.engines.base import (
    AgentCommand,
    EngineUnavailable,
    Machine,
    MachineRequest,
    MachineState,
    RequestRefused,
)
from shoal.engines.ray import RayEngine
from shoal.engines.ray_launcher import describe_node

from .absent import need_ray
from .ray_cluster import HEAD, RayCluster

pytestmark = pytest.mark.slow
UP, PENDING, GONE = MachineState.UP, MachineState.PENDING, MachineState.GONE

#: Writes down what it sees, then lives until SIGTERM.
AGENT = """
import json, os, sys, time
out, token, state, agent = sys.argv[1:]
open(state + "/runs", "a").write(agent + "\\n")
names = ["CUDA_VISIBLE_DEVICES", "SHOAL_NODE", "SHOAL_GPU_TYPE", "SHOAL_RACK", "SHOAL_ADDRESS", "COLOUR"]
seen = {name: os.environ.get(name) for name in names} | {"pid": os.getpid(), "token": open(token).read(),
    "runs": open(state + "/runs").read().split()}
path = os.path.join(out, os.environ["SHOAL_NODE"])
with open(path + ".new", "w") as f:
    json.dump(seen, f)
os.replace(path + ".new", path)
while True:
    time.sleep(0.2)
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    need_ray()
    started = RayCluster()
    yield started
    started.stop()


LABELS = {
    "Ray's own label": ({"ray.io/accelerator-type": "A100"}, {}, "a100"),
    "Ray's own label, before ours": ({"ray.io/accelerator-type": "A100", "gpu": "V100"}, {}, "a100"),
    "our label, before what Ray detected": ({"gpu": "V100"}, {"accelerator_type:T4": 1.0}, "v100"),
    "what Ray detected": ({}, {"accelerator_type:T4": 1.0}, "t4"),
    "nothing": (None, {}, ""),
}


@pytest.mark.parametrize("case", LABELS)
def test_the_gpu_type_is_that_of_the_labels_or_what_ray_detected(case: str) -> None:
    labels, resources, gpu_type = LABELS[case]
    node = {
        "NodeID": "n1",
        "NodeName": "10.0.0.7",
        "NodeManagerHostname": "g7",
        "NodeManagerAddress": "10.0.0.7",
        "Labels": labels,
        "Resources": {"CPU": 8.0, "GPU": 4.0, **resources},
    }
    found = describe_node(node)
    assert (found["gpu_type"], found["gpus"]) == (gpu_type, 4)


def engine(cluster: RayCluster, home: str = "abc1") -> RayEngine:
    return RayEngine(home, address=cluster.address, node_ip=HEAD)


def agents_at(out: Path, n: int) -> list[AgentCommand]:
    argv = (sys.executable, "-S", "-c", AGENT, str(out), "{dir}/token", "{state}", "{agent}")
    return [AgentCommand(argv, {"COLOUR": "red"}, {"token": b"secret"})] * n


async def until(ray: RayEngine, condition: Callable[[list[Machine]], bool]) -> list[Machine]:
    deadline_s = time.monotonic() + 60.0
    while True:
        machines = await ray.poll()
        if condition(machines):
            return machines
        assert time.monotonic() < deadline_s, machines
        await asyncio.sleep(0.1)


async def seen(out: Path, node: str, *, not_pid: int = 0) -> dict[str, Any]:
    deadline_s = time.monotonic() + 60.0
    while True:
        if (out / node).exists():
            found: dict[str, Any] = json.loads((out / node).read_text())
            if found["pid"] != not_pid:
                return found
        assert time.monotonic() < deadline_s, f"no agent on {node}"
        await asyncio.sleep(0.05)


async def ended(pid: int) -> None:
    deadline_s = time.monotonic() + 30.0
    while os.path.exists(f"/proc/{pid}"):
        assert time.monotonic() < deadline_s, f"process {pid} is still there"
        await asyncio.sleep(0.05)


def states(machines: list[Machine]) -> list[MachineState]:
    return [m.state for m in machines]


def run(story: Awaitable[None]) -> None:
    async def main() -> None:
        await story

    asyncio.run(main())


def test_machines_run_are_found_again_released_lost_and_closed(cluster: RayCluster, tmp_path: Path) -> None:
    async def story() -> None:
        ray = engine(cluster)
        with pytest.raises(RequestRefused, match="Ray has no further node with 4 h200 GPU"):
            await ray.request(MachineRequest(4, "h200"), agents_at(tmp_path, 1))
        await until_two_nodes(ray, tmp_path)
        machines = await until(ray, lambda ms: states(ms) == [UP, UP])
        assert {(m.node, m.gpus, m.gpu_type, m.rack) for m in machines} == {
            ("gpu-1", 4, "a100", "r1"),
            ("gpu-2", 4, "v100", "r2"),
        }
        agents = {m.node: await seen(tmp_path, m.node) for m in machines}
        for found in agents.values():
            assert found["CUDA_VISIBLE_DEVICES"] == "0,1,2,3"
            assert (found["token"], found["COLOUR"]) == ("secret", "red")
        first = agents["gpu-1"]
        assert (first["SHOAL_GPU_TYPE"], first["SHOAL_RACK"], first["SHOAL_ADDRESS"]) == (
            "a100",
            "r1",
            "127.0.0.2",
        )
        assert await ray.offers() == []
        assert re.match(r"2\.\d+", await ray.version())

        # An agent that is killed runs again and finds its state.
        os.kill(first["pid"], signal.SIGKILL)
        agents["gpu-1"] = await seen(tmp_path, "gpu-1", not_pid=first["pid"])
        assert agents["gpu-1"]["runs"] == ["gpu-1", "gpu-1"]
        with pytest.raises(RequestRefused, match="2 nodes run an agent already"):
            await ray.request(MachineRequest(4), agents_at(tmp_path, 1))

        # The launcher is killed. The next call starts another, which finds the same actors and processes.
        assert ray.launcher_pid is not None
        os.kill(ray.launcher_pid, signal.SIGKILL)
        await ended_or_zombie(ray.launcher_pid)
        again = await until_available(ray)
        assert {m.id for m in again} == {m.id for m in machines}
        await until(ray, lambda ms: states(ms) == [UP, UP])
        for node, found in agents.items():
            assert (await seen(tmp_path, node))["pid"] == found["pid"]

        # Another home finds the GPUs taken. Ray's own figures say so.
        other = engine(cluster, "xyz9")
        (asked,) = await other.request(MachineRequest(4, "a100"), agents_at(tmp_path / "other", 1))
        (waiting,) = await until(other, lambda ms: states(ms) == [PENDING])
        assert waiting.id == asked.id
        assert waiting.reason == "4 GPUs requested, 0 free on node gpu-1"
        await other.close()

        # A machine is returned.
        first = next(m for m in machines if m.node == "gpu-1")
        await ray.release(first.id)
        await ended(agents["gpu-1"]["pid"])
        await until(ray, lambda ms: [m.node for m in ms] == ["gpu-2"])

        # A node is lost.
        cluster.kill_node("gpu-2")
        (gone,) = await until(ray, lambda ms: states(ms) == [GONE])
        assert gone.node == "gpu-2"
        assert not gone.fenced, "processes on a lost node may still run"
        assert re.search("dead|died|doesn't exist any more|does not know the actor", gone.reason), gone.reason
        await ended(agents["gpu-2"]["pid"])

        # Closing ends what is left.
        await ray.request(MachineRequest(None), agents_at(tmp_path, 1))
        await until(ray, lambda ms: states(ms) == [UP])
        last = await seen(tmp_path, "gpu-1", not_pid=agents["gpu-1"]["pid"])
        await ray.close()
        await ended(last["pid"])
        assert ray.launcher_pid is None
        fresh = engine(cluster)
        assert await fresh.poll() == []
        await fresh.detach()

    run(story())


def test_after_a_cancelled_call_each_call_gets_its_own_answer(cluster: RayCluster, tmp_path: Path) -> None:
    async def story() -> None:
        ray = engine(cluster, "abc2")
        assert [m for m in await ray.offers(drained=["gpu-1"]) if m.gpu_type == "a100"] == []
        with pytest.raises(RequestRefused, match="no further node with 4 a100 GPU"):
            await ray.request(MachineRequest(4, "a100"), agents_at(tmp_path, 1), drained=["gpu-1"])
        await ray.request(MachineRequest(4, "a100"), agents_at(tmp_path, 1))
        await until(ray, lambda ms: states(ms) == [UP])
        pid = (await seen(tmp_path, "gpu-1"))["pid"]
        await cancel_a_poll(ray)
        assert re.match(r"2\.\d+", await ray.version())
        await cancel_a_poll(ray)
        await ray.close()
        await ended(pid)
        fresh = engine(cluster, "abc2")
        await cancel_a_poll(fresh)
        assert await fresh.poll() == [], "a launcher whose start was cancelled is replaced"
        await fresh.detach()

    run(story())


async def cancel_a_poll(ray: RayEngine) -> None:
    """Cancel it while it waits for its answer: the launcher, if it runs, is stopped meanwhile."""
    pid = ray.launcher_pid
    if pid is not None:
        os.kill(pid, signal.SIGSTOP)
    task = asyncio.ensure_future(ray.poll())
    await asyncio.sleep(0.01)
    assert not task.done()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    if pid is not None:
        os.kill(pid, signal.SIGCONT)


async def until_two_nodes(ray: RayEngine, out: Path) -> None:
    """Request a machine on each of the two nodes, as soon as Ray has them."""
    asked = 0
    deadline_s = time.monotonic() + 60.0
    while asked < 2:
        try:
            asked += len(await ray.request(MachineRequest(4), agents_at(out, 2 - asked)))
        except RequestRefused:
            assert time.monotonic() < deadline_s
            await asyncio.sleep(0.2)


async def until_available(ray: RayEngine) -> list[Machine]:
    try:
        return await ray.poll()
    except EngineUnavailable:  # the death of the launcher was not seen before the command was sent
        return await ray.poll()


async def ended_or_zombie(pid: int) -> None:
    deadline_s = time.monotonic() + 10.0
    while Path(f"/proc/{pid}/stat").exists() and " Z " not in Path(f"/proc/{pid}/stat").read_text():
        assert time.monotonic() < deadline_s
        await asyncio.sleep(0.02)


def test_without_ray_the_engine_is_unavailable() -> None:
    async def story() -> None:
        ray = RayEngine("abc1", address="127.0.0.99:1", timeout_s=5.0)
        with pytest.raises(EngineUnavailable, match="Ray"):
            await ray.poll()
        assert ray.launcher_pid is None

    run(story())


def test_importing_the_engines_does_not_import_ray() -> None:
    modules = "shoal.engines.ray, shoal.engines.slurm, shoal.engines.ray_launcher"
    code = f"import sys, {modules}; assert 'ray' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
