"""The autoscaler in the live system: fake workers whose speed has a knee, the real server around them."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from shoal.knowledge.heuristics import Verdict

from .fakes import Fleet, Here, run, server

HALF = "efficiency:threshold=0.5"


class Knee(Fleet):
    """Workers that are faster together up to a number, and not beyond."""

    at = 2

    def step(self, job: int, **more: Any) -> None:
        size = len(self.crew(job))
        super().step(job, seconds=0.1 * size / min(size, self.at), **({"total": 10_000} | more))


async def settled(here: Here, job: int, gpus: int) -> dict[str, Any]:
    def held() -> bool:
        cap = here.loop.scheduler.caps.get(job)
        return cap is not None and "holds it at" in cap.why and here.gpus(job) == gpus

    await here.until(held, train=(job,), turns=12_000)
    found: dict[str, Any] = await here.get(f"/jobs/{job}/why")
    return found


@pytest.mark.parametrize("policy", ["max-min", "afs-l"])
def test_it_climbs_to_the_knee_is_held_there_and_why_says_so(tmp_path: Path, policy: str) -> None:
    async def story() -> None:
        async with server(tmp_path, fleet=Knee(8), policy=policy) as here:
            job = (await here.submit("1..8", autoscale=HALF))["id"]
            await here.until(lambda: here.state(job) == "running")
            assert here.gpus(job) == 1
            assert "measures 1 GPU" in (await here.get(f"/jobs/{job}/why"))["sentence"]
            why = await settled(here, job, 2)
            assert "the autoscaler holds it at 2 GPUs: " in why["sentence"]
            assert why["reason"]["code"] == "NotWorthIt"
            assert why["reason"]["evidence"] == {"gpus": 2, "autoscaler_gpus": 2, "max_gpus": 8}
            events = await here.get("/events", params={"job": job, "type": "job.autoscaled"})
            assert [e["data"]["gpus"] for e in events["items"]][:2] == [2, 4]
            assert not events["items"][-1]["data"]["searching"]

    run(story())


def test_another_server_goes_on_where_the_last_one_was_killed(tmp_path: Path) -> None:
    async def story() -> None:
        fleet = Knee(4)
        async with server(tmp_path, fleet=fleet, policy="max-min", kill=True) as here:
            job = (await here.submit("1..4", autoscale=HALF))["id"]
            await here.until(lambda: here.state(job) == "running")
            await settled(here, job, 2)
        async with server(tmp_path, fleet=fleet, policy="max-min") as here:
            await here.until(lambda: here.gpus(job) == 2)
            assert here.loop.scheduler.caps[job].gpus == 2
            assert "holds it at 2 GPUs" in (await here.get(f"/jobs/{job}/why"))["sentence"]
            assert here.fleet.started == [w for w in fleet.started if w.startswith(f"{job}.")]

    run(story())


def test_its_owner_may_change_the_range_and_a_policy_that_does_not_resize_is_not_held_up(
    tmp_path: Path,
) -> None:
    async def story() -> None:
        async with server(tmp_path, fleet=Knee(4), policy="max-min") as here:
            job = (await here.submit("1..4", autoscale=HALF))["id"]
            await here.until(lambda: here.state(job) == "running")
            await settled(here, job, 2)
            await here.post(f"/jobs/{job}/scale", json={"min": 3})
            await here.until(lambda: here.gpus(job) == 3, train=(job,))
            await here.call("PUT", "/policy", json={"name": "fifo"})
            await here.until(lambda: here.gpus(job) == 4, train=(job,))

    run(story())


def test_a_plan_tells_where_it_begins_and_mistakes_are_told_in_a_sentence(tmp_path: Path) -> None:
    async def story() -> None:
        async with server(tmp_path, 4, policy="max-min") as here:
            spec = {"command": ["train"], "gpus": "1..4", "workdir": "/tmp", "autoscale": HALF}
            plan = await here.post("/plan", json={"spec": spec})
            assert plan["gpus"] == 1
            for wrong, why in {
                "speed": "there is no heuristic named speed",
                "efficiency:limit=1": "has no option 'limit'",
            }.items():
                reply = await here.post("/jobs", json=spec | {"autoscale": wrong}, status=422)
                assert why in reply["error"]["message"]
            for fixed in ({"gpus": "4"}, {"resize": "restart"}):
                reply = await here.post("/jobs", json=spec | fixed, status=422)
                assert "needs a range of GPUs such as 1..8" in reply["error"]["message"]

    run(story())


class Never:
    """A heuristic of someone else's."""

    def judge(self, smaller: Any, larger: Any, progress: Any) -> Verdict:
        return Verdict(-1.0, 0.0, "it never pays")


def test_a_heuristic_of_ones_own_decides_for_a_live_job_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = EntryPoint("never", f"{__name__}:Never", "shoal.heuristics")
    monkeypatch.setattr("shoal.knowledge.heuristics.entry_points", lambda group: [own])

    async def story() -> None:
        async with server(tmp_path, fleet=Knee(4), policy="max-min") as here:
            job = (await here.submit("1..4", autoscale="never"))["id"]
            await here.until(lambda: here.state(job) == "running")
            why = await settled(here, job, 1)
            assert why["sentence"].endswith("the autoscaler holds it at 1 GPU: it never pays")

    run(story())
