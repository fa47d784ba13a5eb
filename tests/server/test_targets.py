"""Every change of a job's target comes from a command of the scheduler and says what caused it."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest

import shoal.server
from shoal.executors.base import NodeInfo

from .fakes import Here, run, server


def targets_of(here: Here, job: int) -> list[dict[str, Any]]:
    return [e for e in here.control.store.events(job=job, limit=1000) if e["type"] == "job.target"]


def test_a_job_that_its_owner_pauses_loses_its_target_by_a_command(tmp_path: Path) -> None:
    async def story() -> None:
        async with server(tmp_path, 2) as here:
            job = (await here.submit("2"))["id"]
            await here.until(lambda: here.state(job) == "running")
            assert (await here.post(f"/jobs/{job}/pause"))["target_gpus"] == 0
            await here.until(lambda: here.loop.jobs[job].target == {})
            event = targets_of(here, job)[-1]
            assert event["message"] == "held by its owner: 2 -> 0 GPUs"
            asked = [e["id"] for e in here.control.store.events(job=job, type="job.paused")]
            causes = [{"kind": "Held", "job": job, "event": asked[0]}]
            assert event["data"] == {
                "verb": "pause", "from_gpus": 2, "to_gpus": 0, "cause": "Held", "causes": causes
            }  # fmt: skip
            assert event["plan"] == here.loop.jobs[job].plan
            shown = {e["id"]: e for e in (await here.get(f"/events?job={job}"))["items"]}
            assert shown[event["id"]]["cause"] == asked[0], "the API names the request that caused it"

    run(story())


@pytest.mark.parametrize("policy", ["fifo", "max-min"])
def test_a_fixed_job_on_a_drained_node_waits_there_and_goes_on_nowhere_else(
    tmp_path: Path, policy: str
) -> None:
    async def story() -> None:
        nodes = tuple(NodeInfo(name, 2, "virtual", True) for name in ("a", "b"))
        async with server(tmp_path, nodes, policy=policy) as here:
            job = (await here.submit("2"))["id"]
            await here.until(lambda: here.state(job) == "running")
            (at,) = here.loop.jobs[job].target
            await here.post(f"/nodes/{'ab'[at]}/drain")
            await here.until(lambda: here.state(job) == "pending")
            event = targets_of(here, job)[-1]
            assert event["message"] == f"{'ab'[at]} is out of use: 2 -> 0 GPUs"
            (asked,) = here.control.store.events(type="node.drained")
            assert event["data"] == {
                "verb": "pause", "from_gpus": 2, "to_gpus": 0, "cause": "NodeLost", "node": "ab"[at],
                "causes": [{"kind": "NodeLost", "node": at, "event": asked["id"]}],
            }  # fmt: skip
            reason = (await here.get(f"/jobs/{job}"))["reason"]
            assert f"its processes are suspended on {'ab'[at]}" in reason["sentence"]
            other = (await here.submit("2"))["id"]  # the other node is not kept for it
            await here.until(lambda: here.state(other) == "running")
            assert {w.node for w in here.loop.jobs[other].workers.values()} == {"ab"[1 - at]}
            assert here.fleet.suspended == {f"{job}.0", f"{job}.1"}
            here.fleet.end(f"{other}.0")
            here.fleet.end(f"{other}.1")
            await here.post(f"/nodes/{'ab'[at]}/uncordon")
            await here.until(lambda: here.state(job) == "running")
            assert {w.node for w in here.loop.jobs[job].workers.values()} == {"ab"[at]}
            assert here.fleet.suspended == set()
            here.check()

    run(story())


def test_one_place_in_the_server_writes_targets() -> None:
    root = Path(shoal.server.__file__).parent
    writers = {
        path.relative_to(root).as_posix()
        for path in root.rglob("*.py")
        if re.search(r"\.target = |\.target\[.*\] = ", path.read_text())
    }
    assert writers == {"loop/targets.py"}


def test_every_cycle_logs_one_line_with_its_number_and_the_time_of_each_phase(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def story() -> None:
        async with server(tmp_path, 2) as here:
            job = (await here.submit("2"))["id"]
            await here.until(lambda: here.state(job) == "running")

    with caplog.at_level(logging.INFO, "shoal.server"):
        run(story())
    lines = [r.message for r in caplog.records if r.message.startswith("cycle ")]
    found = [dict(pair.split("=") for pair in line.split()[1:]) for line in lines]
    assert [int(f["number"]) for f in found] == list(
        range(int(found[0]["number"]), int(found[-1]["number"]) + 1)
    )
    assert sum(int(f["changes"]) for f in found) == 1
    assert all(
        f.keys() == {"number", "events", "changes", "decide_ms", "targets_ms", "sharing_ms", "settle_ms"}
        for f in found
    )
