"""What was, read off the events: why a job had what it had, who took its GPUs, which attempt wrote what."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from shoal.executors.base import NodeInfo

from .fakes import Here, run, server


def now(here: Here) -> str:
    return datetime.fromtimestamp(here.control.clock.now_s(), UTC).isoformat()


async def moment(here: Here) -> str:
    """A time after all that has happened and before all that will."""
    at = now(here)
    await asyncio.sleep(0.002)
    return at


def test_why_at_a_time_tells_of_that_time_though_all_is_different_now(tmp_path: Path) -> None:
    async def story() -> None:
        async with server(tmp_path, 4, policy="fifo") as here:
            before = await moment(here)
            first = (await here.submit("3", name="first"))["id"]
            await here.until(lambda: here.state(first) == "running")
            second = (await here.submit("2", name="second"))["id"]
            await here.until(lambda: second in here.loop.scheduler.jobs)
            waited = await moment(here)
            for rank in range(3):
                here.fleet.end(f"{first}.{rank}")
            await here.until(lambda: here.state(second) == "running")
            ran = await moment(here)
            await here.call("PUT", "/policy", json={"name": "max-min"})
            await here.post(f"/jobs/{second}/pause")
            await here.until(lambda: here.gpus(second) == 0)
            held = await moment(here)

            async def why(at: str, **kwargs: Any) -> Any:
                return await here.get(f"/jobs/{second}/why", params={"at": at}, **kwargs)

            then = await why(waited)
            assert (then["job"]["state"], then["reason"]["code"]) == ("pending", "WaitingForCapacity")
            assert then["reason"]["evidence"]["free_gpus"] == 1
            assert [(j["name"], j["gpus"]) for j in then["ahead"]] == [("first", 3)]
            assert then["policy"] == "fifo"
            assert datetime.fromisoformat(then["at"]) == datetime.fromisoformat(waited)
            then = await why(ran)
            assert (then["job"]["state"], then["job"]["gpus"], then["reason"]) == ("running", 2, None)
            then = await why(held)
            assert (then["job"]["state"], then["reason"]["code"]) == ("paused", "Held")
            assert then["policy"] == "max-min"
            over = await here.get(f"/jobs/{first}/why", params={"at": held})
            assert over["job"]["state"] == "succeeded"
            assert "submitted later" in (await why(before, status=422))["error"]["message"]
            assert "yet to come" in (await why("2999-01-01T00:00:00Z", status=422))["error"]["message"]

    run(story())


def test_a_job_that_lost_gpus_is_told_who_got_them_by_which_rule_and_why(tmp_path: Path) -> None:
    async def story() -> None:
        async with server(tmp_path, 4, policy="max-min") as here:
            await here.add_user("ada")
            await here.add_user("ben")
            first = (await here.submit("1..4", name="first", user="ada"))["id"]
            await here.until(lambda: here.state(first) == "running")
            assert (await here.get(f"/jobs/{first}/why", params={"preempted": True}))["preempted"] is None
            second = (await here.submit("1..4", name="second", user="ben"))["id"]
            await here.until(lambda: here.state(second) == "running", train=(first, second))
            found = (await here.get(f"/jobs/{first}/why", params={"preempted": True}))["preempted"]
            assert (found["from_gpus"], found["to_gpus"], found["policy"]) == (4, 2, "max-min")
            assert [j["name"] for j in found["by"]] == ["second"]
            assert found["reason"]["code"] == "NotWorthIt"
            assert found["decision"] is not None
            assert "second" in found["sentence"]
            mine = (await here.get(f"/jobs/{first}/why", params={"preempted": True}, user="ada"))["preempted"]
            assert [(j["name"], j["user"]) for j in mine["by"]] == [(None, "ben")]
            assert "second" not in mine["sentence"], "the name of another's job is its owner's affair"
            text = await here.get("/metrics")
            assert 'preemptions_total{kind="shrink",preemptor_user="ben",victim_user="ada"} 1' in text

    run(story())


def test_an_attempt_has_the_lines_of_its_own_workers(tmp_path: Path) -> None:
    async def story() -> None:
        async with server(tmp_path, 1) as here:
            job = (await here.submit("1", max_restarts=1))["id"]
            for attempt in range(2):
                await here.until(lambda n=attempt: f"{job}.{n}" in here.fleet.running)  # type: ignore[misc]
                directory = here.loop.worker_directory(job, f"{job}.{attempt}")
                directory.mkdir(parents=True)
                (directory / "log.0").write_text(f"2026-01-01T00:00:0{attempt}.000000Z try {attempt}\n")
                here.fleet.end(f"{job}.{attempt}", 1)
            await here.until(lambda: here.state(job) == "failed")

            async def lines(**which: Any) -> list[str]:
                page = await here.get(f"/jobs/{job}/logs", params=which)
                return [line["text"] for line in page["items"]]

            assert await lines() == ["try 0", "try 1"]
            assert await lines(attempt=0) == ["try 0"]
            assert await lines(attempt=1) == ["try 1"]
            assert await lines(attempt=2) == []

    run(story())


TWO = (NodeInfo("a", 2, "gpu", True), NodeInfo("b", 2, "gpu", True))


@pytest.mark.parametrize("policy", ["fifo", "max-min", "afs-l", "gandiva-fair", "srtf"])
def test_a_drained_node_is_left_and_used_again_later(tmp_path: Path, policy: str) -> None:
    async def story() -> None:
        async with server(tmp_path, TWO, policy=policy) as here:
            live = (await here.submit("1..4", name="live", requested_gpus=2, expected_s=100))["id"]
            rigid = (await here.submit("2", name="rigid", resize="restart", expected_s=100))["id"]
            await here.until(
                lambda: here.state(live) == here.state(rigid) == "running" and here.gpus(live) == 2,
                train=(live,),
            )
            both = (live, rigid)
            node = next(iter(here.loop.jobs[rigid].target))
            name = TWO[node].name
            drained = await here.post(f"/nodes/{name}/drain")
            assert drained["state"] == "drained"
            await here.until(
                lambda: not any(s.node == name for s in here.fleet.running.values()), train=(live,)
            )
            await here.until(lambda: sum(here.gpus(j) for j in both) == 2, train=(live,))
            assert all(node not in here.loop.jobs[j].target for j in both)
            waits = [j for j in both if not here.gpus(j)]
            for job in waits:
                assert (await here.get(f"/jobs/{job}"))["reason"] is not None
            assert (await here.get(f"/nodes/{name}"))["jobs"] == []
            await here.post(f"/nodes/{name}/uncordon")
            await here.until(lambda: all(here.gpus(j) >= 1 for j in both), train=(live,))
            assert {n["state"] for n in (await here.get("/nodes"))["items"]} == {"ready"}
            assert here.loop.policy_name == policy, "no decision failed on the way"

    run(story())


@pytest.mark.parametrize("policy", ["fifo", "max-min", "afs-l", "gandiva-fair"])
def test_losing_the_only_node_lets_all_jobs_wait_and_breaks_nothing(tmp_path: Path, policy: str) -> None:
    async def story() -> None:
        async with server(tmp_path, 2, policy=policy) as here:
            job = (await here.submit("1..2"))["id"]
            await here.until(lambda: here.state(job) == "running")
            await here.post("/nodes/local/drain")
            await here.until(lambda: here.gpus(job) == 0, train=(job,))
            new = (await here.submit("1"))["id"]
            await here.until(lambda: new in here.loop.scheduler.jobs)
            assert here.loop.policy_name == policy
            reason = (await here.get(f"/jobs/{new}"))["reason"]
            assert reason["code"] == "WaitingForCapacity"
            assert "uncordon" in str(reason)
        async with server(tmp_path, 2, policy=None) as here:
            assert (await here.get("/nodes/local"))["state"] == "drained", "it is remembered"
            await here.post("/nodes/local/uncordon")
            await here.until(lambda: here.loop.devices.used > 0, train=(job,))

    run(story())
