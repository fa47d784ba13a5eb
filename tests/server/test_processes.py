"""A command starts once per machine and sees all its GPUs, or once per GPU."""

from __future__ import annotations

import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from executors.test_gpus import CARDS, driver
from shoal.executors.base import NodeInfo
from shoal.executors.local import LocalExecutor
from shoal.server.loop.processes import divided, environment

from .fakes import Fleet, run, server

NODES = (
    NodeInfo("a", 2, "v100", True, address="10.0.0.1"),
    NodeInfo("b", 2, "v100", True, address="10.0.0.2"),
)


def test_a_command_has_one_process_per_machine_that_sees_all_its_gpus(tmp_path: Path) -> None:
    async def story() -> None:
        fleet = Fleet(NODES)
        async with server(tmp_path, fleet=fleet) as here:
            job = (await here.submit("4", per_gpu=False))["id"]
            await here.until(lambda: here.state(job) == "running")
            first, second = fleet.running[f"{job}.0"], fleet.running[f"{job}.1"]
            assert (first.node, first.gpus, second.node, second.gpus) == ("a", (0, 1), "b", (0, 1))
            assert [s.env["PET_NODE_RANK"] for s in (first, second)] == ["0", "1"]
            for spec in (first, second):
                assert spec.env["PET_NNODES"] == spec.env["SHOAL_NODES"] == "2"
                assert spec.env["PET_NPROC_PER_NODE"] == spec.env["SHOAL_GPUS"] == "2"
                assert spec.env["PET_MASTER_ADDR"] == spec.env["MASTER_ADDR"] == "10.0.0.1"
                assert spec.env["PET_MASTER_PORT"] == spec.env["MASTER_PORT"]
                assert not {"RANK", "WORLD_SIZE", "LOCAL_RANK"} & spec.env.keys()
            shown = await here.get(f"/jobs/{job}")
            assert shown["gpus"] == 4
            assert shown["placement"] == [{"node": "a", "gpus": [0, 1]}, {"node": "b", "gpus": [0, 1]}]
            assert [w["gpus"] for w in shown["workers"]] == [[0, 1], [0, 1]]
            here.check()
            fleet.end(f"{job}.0")
            await here.until(lambda: here.gpus(job) == 2)
            fleet.end(f"{job}.1")
            await here.until(lambda: here.state(job) == "succeeded")
            assert here.loop.devices.used == 0

    run(story())


def test_its_gpus_are_released_and_taken_again_together_also_over_a_restart_of_the_server(
    tmp_path: Path,
) -> None:
    async def story() -> None:
        fleet = Fleet(2)
        async with server(tmp_path, fleet=fleet, kill=True) as here:
            job = (await here.submit("2", per_gpu=False, name="two"))["id"]
            await here.until(lambda: here.state(job) == "running")
        async with server(tmp_path, fleet=fleet) as here:
            await here.until(lambda: here.loop.decided_s is not None)
            assert here.gpus(job) == here.loop.devices.used == 2
            await here.post(f"/jobs/{job}/pause")
            other = (await here.submit("1"))["id"]
            await here.until(lambda: here.state(other) == "running")
            assert fleet.suspended == {f"{job}.0"}
            await here.post(f"/jobs/{job}/resume")
            fleet.end(f"{other}.0")
            await here.until(lambda: here.state(job) == "running")
            assert here.gpus(job) == 2
            assert fleet.started.count(f"{job}.0") == 1
            here.check()

    run(story())


def test_per_gpu_sets_the_usual_ranks() -> None:
    devices = [(0, 1), (0, 3), (2, 0)]
    groups = divided(devices, per_gpu=True)
    made = [environment(groups, rank, per_gpu=True, address="h", port=7) for rank in range(3)]
    assert [(e["RANK"], e["WORLD_SIZE"], e["LOCAL_RANK"], e["LOCAL_WORLD_SIZE"]) for e in made] == [
        ("0", "3", "0", "2"), ("1", "3", "1", "2"), ("2", "3", "0", "1"),
    ]  # fmt: skip
    assert [e["SHOAL_NODE_RANK"] for e in made] == ["0", "0", "1"]


def test_cuda_local_rank_is_a_ranks_own_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As torchrun does it: every process of a machine sees all GPUs of the job there, and uses cuda:LOCAL_RANK."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setitem(sys.modules, "pynvml", driver(CARDS))
    nodes = (NodeInfo("a100s", 2, "a100", False), NodeInfo("v100s", 1, "a100", False))

    async def story() -> None:
        fleet = Fleet(nodes)
        async with server(tmp_path, fleet=fleet) as here:
            job = (await here.submit("3", per_gpu=True))["id"]
            await here.until(lambda: here.state(job) == "running")
            executor = LocalExecutor()  # of a machine with two GPUs of one type and one of another
            seen = []
            for rank in range(3):
                spec = fleet.running[f"{job}.{rank}"]
                spec = replace(spec, node={"a100s": "local-a100", "v100s": "local-v100"}[spec.node])
                env = executor._env(spec)
                visible, local = env["CUDA_VISIBLE_DEVICES"].split(","), int(env["LOCAL_RANK"])
                assert len(visible) == int(env["LOCAL_WORLD_SIZE"])
                assert env["SHOAL_DEVICE"] == f"cuda:{local}"
                seen.append(visible[local])
            assert seen == ["GPU-aaa", "GPU-bbb", "GPU-ccc"], "each rank has another GPU"

    run(story())


SCRIPT = """
import os, torch.distributed as dist
dist.init_process_group("gloo")
total = __import__("torch").ones(1)
dist.all_reduce(total)
print("rank", dist.get_rank(), "of", dist.get_world_size(), "sum", int(total))
dist.destroy_process_group()
"""


@pytest.mark.parametrize("options", [["--nproc-per-node", "1"], []], ids=["with the number given", "plain"])
def test_plain_torchrun_works_over_two_machines(tmp_path: Path, options: list[str]) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    groups = divided([(0, 0), (1, 0)], per_gpu=False)
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *options, "train.py"],
            cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env={"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
            | environment(groups, rank, per_gpu=False, address="127.0.0.1", port=port),
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        out = "".join(process.communicate(timeout=120)[0] for process in started)
    finally:
        for process in started:
            process.kill()
    assert sorted(line for line in out.splitlines() if line.startswith("rank")) == [
        "rank 0 of 2 sum 2",
        "rank 1 of 2 sum 2",
    ], out
