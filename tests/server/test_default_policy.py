"""The default policy: users get their shares soon, and what jobs say of their length changes nothing."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.server.fakes import run, server

from shoal.core.events import Event, Submitted
from shoal.core.plan import Plan
from shoal.core.words import spoken
from shoal.server.api.models import Estimate
from shoal.server.services.deadline import verdict


def test_a_user_who_arrives_gets_the_entitled_share_soon(tmp_path: Path) -> None:
    async def story() -> None:
        async with server(tmp_path, 6, policy=None) as here:
            assert here.loop.policy_name == "fair-afs"
            await here.add_user("ada", tickets=2.0)
            await here.add_user("ben")
            jobs = tuple([(await here.submit("1..6", user="ada"))["id"] for _ in range(2)])
            await here.until(lambda: sum(map(here.gpus, jobs)) == 6, train=jobs)
            decisions: list[tuple[bool, dict[int, int]]] = []
            decide = here.loop.scheduler.step

            def step(now_s: float, events: list[Event]) -> Plan:
                plan = decide(now_s, events)
                arrives = any(isinstance(e, Submitted) for e in events)
                decisions.append((arrives, {c.job: c.share.gpus for c in plan.commands}))
                return plan

            here.loop.scheduler.step = step
            late = (await here.submit("1..6", user="ben"))["id"]
            await here.until(lambda: here.gpus(late) == 2, train=(*jobs, late))
            # The first decision that knows the job takes the share from the others. No quantum is waited for: jobs
            # that are live leave their GPUs after the step that they are in.
            (given,) = [shares for arrives, shares in decisions if arrives]
            assert given[late] == 2
            assert sum(here.loop.jobs[job].target_gpus for job in jobs) == 4
            assert sum(map(here.gpus, jobs)) == 4

    run(story())


def test_a_declared_length_gains_and_costs_nothing(tmp_path: Path) -> None:
    async def shares(**honest: Any) -> list[int]:
        found: list[int] = []
        async with server(tmp_path / str(len(honest)), 4, policy=None) as here:
            for user in ("ada", "ben"):
                await here.add_user(user)
            first = (await here.submit("1..4", user="ada", **honest))["id"]
            second = (await here.submit("1..4", user="ada"))["id"]
            third = (await here.submit("1..4", user="ben"))["id"]
            jobs = (first, second, third)
            await here.until(lambda: sum(map(here.gpus, jobs)) == 4 and all(map(here.gpus, jobs)), train=jobs)
            found += map(here.gpus, jobs)
        return found

    async def story() -> None:
        assert await shares() == await shares(expected_s=7200.0)

    run(story())


def test_what_the_policy_ignores_is_said(tmp_path: Path) -> None:
    async def story() -> None:
        async with server(tmp_path, 4, policy="fifo") as here:
            assert not (await here.get("/status"))["warnings"][:-1]
            await here.add_user("ada")
            set_ = await here.call("PATCH", "/users/ada", json={"tickets": 3}, status=200)
            assert set_["warnings"] == ["policy fifo ignores tickets; fair-afs and others use them"]
            await here.submit("1", weight=2.0, expected_s=60.0)
            warnings = " ".join((await here.get("/status"))["warnings"])
            doctor = await here.get("/doctor")
            said = " ".join(c["message"] for c in doctor["checks"] if c["name"] == "ignored")
            for part in ("ignores the tickets of users", "ignores weights", "ignores how long jobs take"):
                assert part in warnings
                assert part in said
            await here.call("PUT", "/policy", json={"name": "gandiva-fair"}, status=200)
            warnings = " ".join((await here.get("/status"))["warnings"])
            assert "tickets" not in warnings
            assert "weights" not in warnings

    run(story())


def test_why_states_the_quantum_and_whether_the_deadline_is_met(tmp_path: Path) -> None:
    async def story() -> None:
        async with server(tmp_path, 1, policy=None) as here:
            first = (await here.submit("1", expected_s=100.0))["id"]
            await here.until(lambda: here.gpus(first) == 1)
            deadline = (datetime.now(UTC) + timedelta(hours=1)).isoformat()
            job = (await here.submit("1", expected_s=36000.0, deadline=deadline))["id"]
            await here.until(lambda: job in here.loop.scheduler.jobs)
            why = await here.get(f"/jobs/{job}/why")
            assert why["quantum"].startswith("a job of a fixed size keeps its GPUs for a quantum of 30 min")
            assert why["deadline"].startswith("its deadline is in 60 min, and it ")
            assert "will be missed by" in why["deadline"] or "will be late" in why["deadline"]

    run(story())


HOUR = Estimate(low_s=3600.0, high_s=7200.0, basis="x")


@pytest.mark.parametrize(
    ("left_s", "starts_in", "remaining", "end"),
    [
        (10_000.0, None, HOUR, "and it will be done in 1 h to 2 h: it will be met"),
        (5_000.0, None, HOUR, ": it may be missed"),
        (1_800.0, None, HOUR, ": it will be missed by 30 min or more"),
        (10_000.0, HOUR, HOUR, "done in 2 h to 4 h: it may be missed"),
        (10_000.0, Estimate(unknown="nobody knows"), HOUR, "needs 1 h to 2 h once it runs: nobody knows"),
        (60.0, Estimate(unknown="nobody knows"), HOUR, "once it runs: it will be late"),
        (60.0, None, Estimate(unknown="no length"), "whether it will be met is not known: no length"),
        (-60.0, None, HOUR, "its deadline was 1 min ago: it is late"),
    ],
)
def test_the_verdict_on_a_deadline(
    left_s: float, starts_in: Estimate | None, remaining: Estimate, end: str
) -> None:
    assert verdict(left_s, starts_in, remaining).endswith(end)


def test_durations_as_people_say_them() -> None:
    found = [spoken(s) for s in (0.5, 45, 60, 90, 1800, 3600, 9000, 86400, 3 * 86400)]
    assert found == ["0.5 s", "45 s", "1 min", "1.5 min", "30 min", "1 h", "2.5 h", "24 h", "3 d"]
