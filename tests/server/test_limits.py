"""Limits, priorities, dependencies, time limits and arrays on a server with fake workers."""

from __future__ import annotations

import asyncio
import math
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.server.fakes import Here, run, server

from shoal.cli import array_lines
from shoal.core.events import Timer
from shoal.core.limits import MONDAY_S, WEEK_S
from shoal.executors.base import NodeInfo
from shoal.server.api.models import Array, Job, UserChange


async def limited(here: Here, user: str, **limits: Any) -> None:
    await here.add_user(user)
    await here.call("PATCH", f"/users/{user}", json={"limits": limits}, status=200)


async def decided(here: Here) -> None:
    """Wait until all that was asked for is decided."""
    await here.until(
        lambda: here.loop.decided_s is not None and not here.loop._inbox and not here.loop.reconciler
    )


def later(**delta: float) -> str:
    return (datetime.now(UTC) + timedelta(**delta)).isoformat()


async def reason(here: Here, job: int) -> dict[str, Any]:
    found = (await here.get(f"/jobs/{job}"))["reason"]
    assert found is not None
    return dict(found)


# -- limits -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["fifo", "fair-afs", "afs-l"])
def test_a_user_never_has_more_gpus_than_the_limit_and_is_told_why(tmp_path: Path, policy: str) -> None:
    async def story() -> None:
        async with server(tmp_path, 8, policy=policy) as here:
            await limited(here, "ada", max_gpus=3)
            jobs = [(await here.submit("2", user="ada"))["id"] for _ in range(3)]
            await here.until(lambda: here.gpus(jobs[0]) == 2)
            await decided(here)
            assert [here.gpus(job) for job in jobs] == [2, 0, 0]
            why = await reason(here, jobs[1])
            assert why["code"] == "QuotaExhausted"
            assert "the limit of user ada is 3 GPUs, and 2 are in use" in why["sentence"]
            assert why["evidence"]["limit"] == "max_gpus"
            assert why["evidence"]["in_use"] == 2
            full = await here.get(f"/jobs/{jobs[1]}/why")
            assert full["reason"]["code"] == "QuotaExhausted"
            await here.call("PATCH", "/users/ada", json={"limits": {"max_gpus": None}}, status=200)
            await here.until(lambda: sum(here.gpus(job) for job in jobs) == 6)

    run(story())


def test_a_job_that_alone_exceeds_a_limit_waits_with_that_reason(tmp_path: Path) -> None:
    async def story() -> None:
        async with server(tmp_path, 4) as here:
            await limited(here, "ada", max_gpus=1)
            job = (await here.submit("2", user="ada"))["id"]
            await decided(here)
            why = await reason(here, job)
            assert why["code"] == "ExceedsLimit"
            assert why["sentence"] == "it needs 2 GPUs; the limit of user ada is 1 GPU"

    run(story())


def test_a_limit_below_the_present_use_takes_gpus_and_loses_no_job(tmp_path: Path) -> None:
    async def story() -> None:
        async with server(tmp_path, 4) as here:
            await here.add_user("ada")
            jobs = [(await here.submit("2", user="ada"))["id"] for _ in range(2)]
            await here.until(lambda: sum(here.gpus(job) for job in jobs) == 4)
            found = await here.call("PATCH", "/users/ada", json={"limits": {"max_gpus": 2}}, status=200)
            assert found["warnings"] == [
                "ada has 4 GPUs at once, more than the limit of 2: jobs shrink or wait until it is kept"
            ]
            await here.until(lambda: sum(here.gpus(job) for job in jobs) == 2)
            assert sorted(here.state(job) for job in jobs) == ["pending", "running"]

    run(story())


def test_a_limit_of_one_gpu_type_leaves_those_of_others(tmp_path: Path) -> None:
    nodes = (NodeInfo("n0", 2, "a100", True), NodeInfo("n1", 2, "v100", True))

    async def story() -> None:
        async with server(tmp_path, nodes) as here:
            await limited(here, "ada", max_gpus_of_type={"a100": 1})
            await here.post("/groups", json={"name": "all", "limits": {"max_gpus_of_type": {"v100": 1}}})
            for path in ("/users/ada", "/groups/all"):
                found = {}
                for change in ({"v100": 2}, {"a100": 2}, {"v100": None}):
                    limits = {"max_gpus_of_type": change}
                    found = await here.call("PATCH", path, json={"limits": limits}, status=200)
                    if change == {"a100": 2}:
                        assert found["limits"]["max_gpus_of_type"] == {"a100": 2, "v100": 2}
                assert found["limits"]["max_gpus_of_type"] == {"a100": 2}
                found = await here.call(
                    "PATCH", path, json={"limits": {"max_gpus_of_type": None}}, status=200
                )
                assert not found["limits"]["max_gpus_of_type"]

    run(story())


def test_the_limits_of_a_group_hold_for_its_users_together(tmp_path: Path) -> None:
    async def story() -> None:
        async with server(tmp_path, 8) as here:
            await here.post("/groups", json={"name": "vision", "limits": {"max_running_jobs": 2}}, status=201)
            for user in ("ada", "ben", "cyd"):
                await here.add_user(user)
                group = "vision" if user != "cyd" else ""
                await here.call("PATCH", f"/users/{user}", json={"group": group}, status=200)
            jobs = [(await here.submit("1", user=user))["id"] for user in ("ada", "ada", "ben", "cyd")]
            await here.until(lambda: here.gpus(jobs[3]) == 1)
            await decided(here)
            assert sum(here.gpus(job) for job in jobs[:3]) == 2
            waits = next(job for job in jobs[:3] if not here.gpus(job))
            assert "the limit of group vision is 2 running jobs" in (await reason(here, waits))["sentence"]
            group = await here.get("/groups/vision", user="ada")
            assert (group["users"], group["use"]["running_jobs"]) == (["ada", "ben"], 2)
            await here.get("/groups/vision", user="cyd", status=404)
            refused = await here.call("DELETE", "/groups/vision", status=409)
            assert refused["error"]["message"] == "ada, ben are in group vision"
            here.fleet.end(next(w for w in here.fleet.running if not w.startswith(f"{jobs[3]}.")))
            await here.until(lambda: here.gpus(waits) == 1)

    run(story())


def test_waiting_jobs_beyond_the_limit_are_refused(tmp_path: Path) -> None:
    async def story() -> None:
        async with server(tmp_path, 1) as here:
            await limited(here, "ada", max_waiting_jobs=1)
            first = (await here.submit("1", user="ada"))["id"]
            await here.until(lambda: here.gpus(first) == 1)
            await here.submit("1", user="ada")
            body = {"command": ["x"], "gpus": "1", "workdir": "/tmp"}
            refused = await here.post("/jobs", user="ada", json=body, status=409)
            assert (
                "the limit of user ada is 1 waiting job, and 1 waits already" in refused["error"]["message"]
            )
            await here.post("/arrays", user="ada", json=body | {"array": "0-3"}, status=409)
            assert len(here.loop.jobs) == 2

    run(story())


def test_a_job_without_any_quota_waits_until_monday(tmp_path: Path) -> None:
    async def story() -> None:
        async with server(tmp_path, 4) as here:
            await limited(here, "ada", gpu_hours_per_week=0.0)
            job = (await here.submit("1", user="ada"))["id"]
            await decided(here)
            why = await reason(here, job)
            assert why["code"] == "QuotaExhausted"
            assert "has used 0.0 of 0 GPU hours of this week; the next begins in" in why["sentence"]
            assert 0 < why["evidence"]["frees_in_s"] <= 7 * 86400

    run(story())


def wakes_in_s(here: Here) -> float:
    """Until the next decision that no event brings about."""
    return float(here.loop._inbox._wake.when() - asyncio.get_running_loop().time())


@pytest.mark.parametrize("kind", [{"gpus": "2", "resize": "never"}, {"gpus": "1..2"}])
def test_a_used_up_quota_pauses_running_jobs_and_monday_resumes_them(
    tmp_path: Path, kind: dict[str, str]
) -> None:
    async def story() -> None:
        async with server(tmp_path, 4, policy="max-min") as here:
            now_s = here.loop.now_s()
            monday_s = MONDAY_S + WEEK_S * math.ceil((now_s - MONDAY_S) / WEEK_S)
            here.loop.clock.offset_s += monday_s + 86400 - now_s  # it is Tuesday now
            await limited(here, "ada", gpu_hours_per_week=1.0)
            job = (await here.submit(user="ada", **kind))["id"]
            await here.until(lambda: here.gpus(job) == 2 and here.state(job) == "running", train=(job,))
            other = (await here.submit("1"))["id"]
            await here.until(lambda: here.gpus(other) == 1)
            await decided(here)
            assert 1700 < wakes_in_s(here) < 1801, "2 GPUs use up one GPU hour in half an hour"
            here.loop.clock.offset_s += 1801
            here.loop.take_in(Timer())
            await here.until(lambda: here.gpus(job) == 0 and here.state(job) == "pending", train=(job,))
            assert here.gpus(other) == 1
            why = await reason(here, job)
            assert why["code"] == "QuotaExhausted"
            assert "has used 1.0 of 1 GPU hours of this week" in why["sentence"]
            left_s = monday_s + WEEK_S - here.loop.now_s()
            assert why["evidence"]["frees_in_s"] == pytest.approx(left_s, abs=60)
            await decided(here)
            assert wakes_in_s(here) <= left_s + 1
            here.loop.clock.offset_s += left_s + 1
            here.loop.take_in(Timer())
            await here.until(lambda: here.gpus(job) == 2 and here.state(job) == "running", train=(job,))
            assert here.loop.jobs[job].life.restarts == 0

    run(story())


def test_a_limit_that_is_taken_back_at_once_is_gone(tmp_path: Path) -> None:
    async def story() -> None:
        async with server(tmp_path, 4) as here:
            await here.add_user("ada")
            for most in (1, None):
                change = {"limits": {"max_gpus": most}}
                here.control.services.users.change("ada", UserChange.model_validate(change), "admin")
            jobs = [(await here.submit("2", user="ada"))["id"] for _ in range(2)]
            await here.until(lambda: sum(map(here.gpus, jobs)) == 4)

    run(story())


def test_the_tickets_of_a_group_are_those_of_its_active_users(tmp_path: Path) -> None:
    async def story() -> None:
        async with server(tmp_path, 4, policy="fair-afs") as here:
            await here.post("/groups", json={"name": "vision", "tickets": 1}, status=201)
            for user in ("ada", "ben", "cyd"):
                await here.add_user(user, tickets=1.0)
            for user in ("ada", "ben"):
                await here.call("PATCH", f"/users/{user}", json={"group": "vision"}, status=200)
            jobs = {user: (await here.submit("1..4", user=user))["id"] for user in ("ada", "ben", "cyd")}
            live = tuple(jobs.values())
            await here.until(
                lambda: (
                    {user: here.gpus(job) for user, job in jobs.items()} == {"ada": 1, "ben": 1, "cyd": 2}
                ),
                train=live,
            )
            due = {s["user"]: s["entitled_gpus"] for s in (await here.get("/shares"))["items"]}
            assert (due["ada"], due["ben"], due["cyd"]) == (1.0, 1.0, 2.0)

    run(story())


def test_limits_and_groups_survive_a_restart(tmp_path: Path) -> None:
    async def story() -> None:
        async with server(tmp_path, 4) as here:
            await here.post("/groups", json={"name": "vision", "limits": {"max_gpus": 1}}, status=201)
            await here.add_user("ada")
            await here.call("PATCH", "/users/ada", json={"group": "vision"}, status=200)
            first, second = [(await here.submit("1", user="ada"))["id"] for _ in range(2)]
            await here.until(lambda: here.gpus(first) == 1)
            fleet = here.fleet
        async with server(tmp_path, 4, fleet=fleet) as here:
            await decided(here)
            assert here.gpus(second) == 0
            assert "group vision" in (await reason(here, second))["sentence"]

    run(story())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"limits": {"max_gpus": -1}}, "greater than or equal to 0"),
        ({"limits": {"max_gpus_of_type": {"h100": 1}}}, "no node has GPUs of type 'h100'"),
        ({"limits": {"max_gpu": 1}}, "max_gpu"),
        ({"group": "nobody"}, "there is no group 'nobody'"),
    ],
)
def test_wrong_limits_are_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    async def story() -> None:
        async with server(tmp_path) as here:
            await here.add_user("ada")
            reply = await here.http.patch(
                "/api/v1/users/ada", json=change, headers={"Authorization": f"Bearer {here.tokens['admin']}"}
            )
            assert reply.status_code in (404, 422, 400), reply.text
            assert message in reply.text

    run(story())


# -- conditions ---------------------------------------------------------------------------------------


def test_a_higher_priority_starts_first_among_the_own_jobs(tmp_path: Path) -> None:
    async def story() -> None:
        async with server(tmp_path, 1) as here:
            first = (await here.submit("1"))["id"]
            await here.until(lambda: here.gpus(first) == 1)
            low = (await here.submit("1"))["id"]
            high = (await here.submit("1", priority=5))["id"]
            here.fleet.end(f"{first}.0")
            await here.until(lambda: here.gpus(high) == 1)
            assert here.gpus(low) == 0

    run(story())


def test_a_job_waits_for_the_success_of_another(tmp_path: Path) -> None:
    async def story() -> None:
        async with server(tmp_path, 4) as here:
            first = await here.submit("1", name="prepare")
            second = (await here.submit("1", after=["prepare"]))["id"]
            any_ = (await here.submit("1", after=[{"job": str(first["id"]), "on": "any"}]))["id"]
            failed = (await here.submit("1", name="mourner", after=[{"job": "prepare", "on": "failure"}]))[
                "id"
            ]
            last = (await here.submit("1", after=["mourner"]))["id"]
            await here.until(lambda: here.gpus(first["id"]) == 1)
            await decided(here)
            why = await reason(here, second)
            assert (why["code"], why["sentence"]) == ("Dependency", "it waits for the success of prepare")
            here.fleet.end(f"{first['id']}.0")
            await here.until(lambda: here.gpus(second) and here.gpus(any_))
            await here.until(lambda: here.state(failed) == here.state(last) == "cancelled")
            row = here.control.store.job(failed)
            assert row is not None
            assert row["message"] == "it was to run after the failure of prepare, which succeeded"
            late = await here.submit("1", after=["prepare"])
            await here.until(lambda: here.gpus(late["id"]) == 1)
            body = {"command": ["x"], "workdir": "/tmp", "after": [{"job": "prepare", "on": "failure"}]}
            refused = await here.post("/jobs", json=body, status=409)
            assert "could never run" in refused["error"]["message"]

    run(story())


def test_dependencies_survive_a_kill(tmp_path: Path) -> None:
    async def story() -> None:
        async with server(tmp_path, 4, kill=True) as here:
            first = (await here.submit("1"))["id"]
            second = (await here.submit("1", after=[first]))["id"]
            third = (await here.submit("1", after=[{"job": str(first), "on": "failure"}]))["id"]
            await here.until(lambda: here.gpus(first) == 1)
            fleet = here.fleet
        fleet.exits[f"{first}.0"] = await ended_well(f"{first}.0")
        fleet.running.pop(f"{first}.0")
        async with server(tmp_path, 4, fleet=fleet) as here:
            await here.until(lambda: here.gpus(second) == 1 and here.state(third) == "cancelled")

    run(story())


async def ended_well(worker: str) -> Any:
    from shoal.executors.base import Exit

    return Exit(worker, 0, None, "")


def test_a_job_does_not_start_before_its_time(tmp_path: Path) -> None:
    async def story() -> None:
        async with server(tmp_path, 4) as here:
            job = (await here.submit("1", not_before=later(seconds=0.5)))["id"]
            await decided(here)
            assert (await reason(here, job))["code"] == "NotBefore"
            assert here.gpus(job) == 0
            await here.until(lambda: here.gpus(job) == 1)

    run(story())


def test_a_time_limit_warns_then_ends_the_job(tmp_path: Path) -> None:
    async def story() -> None:
        async with server(tmp_path, 4) as here:
            job = (await here.submit("1", time_limit_s=0.8, warn_signal="USR1", warn_s=0.5, max_restarts=3))[
                "id"
            ]
            await here.until(lambda: here.fleet.warned == [(f"{job}.0", "USR1")])
            await here.until(lambda: here.state(job) == "failed")
            row = here.control.store.job(job)
            assert row is not None
            assert row["message"] == "its time limit of 0.8 s is over"
            assert row["restarts"] == 0
            assert here.fleet.told == [f"{job}.0"]

    run(story())


def test_a_live_job_is_asked_for_a_checkpoint_before_its_time_limit(tmp_path: Path) -> None:
    async def story() -> None:
        async with server(tmp_path, 4, policy="afs-p") as here:
            job = (await here.submit("1..2", time_limit_s=3.0))["id"]
            await here.until(lambda: here.state(job) == "running", train=(job,))
            await here.until(lambda: here.state(job) == "failed", train=(job,))
            events = await here.get(f"/events?job={job}&type=job.warned")
            assert "was asked for a checkpoint" in events["items"][0]["message"]

    run(story())


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"deadline": "2020-01-01T00:00:00Z"}, "deadline: it is in the past"),
        ({"deadline": "2999-01-01T00:00:00"}, "deadline: the time has no time zone; write it in UTC"),
        (
            {"deadline": "2999-01-01T00:00:00", "not_before": "2998-01-01T00:00:00Z"},
            "deadline: the time has no time zone",
        ),
        ({"not_before": "2998-01-01T00:00:00"}, "not_before: the time has no time zone"),
        ({"time_limit_s": 0}, "greater than 0"),
        ({"name": "x", "after": ["x"]}, "x would wait for itself"),
        ({"after": ["nothing"]}, "there is no job 'nothing'"),
        ({"array": "0-999999"}, "1,000,000 jobs are too many at once; submit at most 10,000"),
        ({"array": "5-3"}, "5-3 ends before it begins"),
        ({"array": "a"}, "is not an array: write 0-99"),
        ({"sweep": {"lr": []}}, "at least one value"),
        ({"sweep": {"a": list(range(101)), "b": list(range(101))}}, "10,201 jobs are too many"),
        ({"array": "0-3"}, "submit them with POST /arrays"),
        ({"max_running": 3}, "it is for an array or a sweep"),
        ({"priority": 10**9}, "less than or equal to 1000"),
        ({"labels": {"a b": "c"}}, "labels"),
        ({"warn_signal": "KILL", "time_limit_s": 5}, "USR1"),
    ],
)
def test_wrong_conditions_are_refused_in_one_line(tmp_path: Path, spec: dict[str, Any], message: str) -> None:
    async def story() -> None:
        async with server(tmp_path) as here:
            body = {"command": ["x"], "workdir": "/tmp", **spec}
            refused = await here.post("/jobs", json=body, status=422)
            assert message in refused["error"]["message"]
            assert "\n" not in refused["error"]["message"]
            assert not here.loop.jobs

    run(story())


# -- arrays -------------------------------------------------------------------------------------------


def test_an_array_runs_so_many_at_once_and_each_task_knows_its_number(tmp_path: Path) -> None:
    async def story() -> None:
        async with server(tmp_path, 8) as here:
            body = {"command": ["train", "--fold", "{index}"], "workdir": "/tmp", "name": "folds"}
            array = await here.post("/arrays", json=body | {"array": "3-9%2"}, status=201)
            assert (array["tasks"], array["max_running"], array["jobs"]) == (7, 2, {"pending": 7})
            done: set[str] = set()
            while len(done) < 7:
                await here.until(lambda: len(here.fleet.running) == min(2, 7 - len(done)))
                await decided(here)
                assert len(here.fleet.running) == min(2, 7 - len(done))
                for worker, spec in list(here.fleet.running.items()):
                    index = spec.env["SHOAL_ARRAY_INDEX"]
                    assert spec.command == ("train", "--fold", index)
                    assert (spec.env["SHOAL_ARRAY_NAME"], spec.env["SHOAL_ARRAY_TASKS"]) == ("folds", "7")
                    done.add(index)
                    here.fleet.end(worker)
                    await here.until(lambda w=worker: w not in here.fleet.running)
                    break
            await here.until(lambda: not here.loop.jobs)
            assert done == set("3456789")
            assert (await here.get("/arrays/folds"))["jobs"] == {"succeeded": 7}

    run(story())


def test_a_sweep_submits_every_combination(tmp_path: Path) -> None:
    async def story() -> None:
        async with server(tmp_path, 8) as here:
            body = {
                "command": ["train", "--lr={lr}", "{}", "{other}"],
                "workdir": "/tmp",
                "env": {"SEED": "{seed}"},
            }
            body |= {"sweep": {"lr": [0.1, 0.01], "seed": [1, 2, 3]}, "name": "tune", "labels": {"team": "a"}}
            await here.post("/arrays", json=body, status=201)
            found = await here.get("/jobs?array=tune&label=lr=0.01&label=team=a")
            assert [job["env"]["SEED"] for job in found["items"]] == ["3", "2", "1"]
            assert found["items"][0]["command"] == ["train", "--lr=0.01", "{}", "{other}"]
            assert found["items"][0]["array"] == {
                "id": 1, "name": "tune", "index": 5, "values": {"lr": 0.01, "seed": 3},
            }  # fmt: skip
            waits = (await here.submit("1", after=["tune"]))["id"]
            await here.until(lambda: len(here.fleet.running) == 6)
            cancelled = await here.post("/arrays/tune/cancel")
            assert sum(cancelled["jobs"].values()) == 6
            await here.until(lambda: here.state(waits) == "cancelled")
            await here.post("/arrays/tune/cancel", status=409)

    run(story())


def test_a_thousand_jobs_are_submitted_in_one_call(tmp_path: Path) -> None:
    async def story() -> None:
        async with server(tmp_path, 8) as here:
            body = {"command": ["train"], "workdir": "/tmp", "array": "0-999%8", "name": "many"}
            before = here.control.store.last_event_id
            array = await here.post("/arrays", json=body, status=201)
            assert array["tasks"] == 1000
            assert here.control.store.last_event_id - before <= 1000 + 1
            assert len(here.loop.jobs) == 1000
            await here.until(lambda: len(here.fleet.running) == 8)
            again = await here.post("/arrays", json=body, status=409)
            assert "'many-0'" in again["error"]["message"]
            other = await here.submit("1", name="other")
            listed: list[Job] = []
            page = await here.get("/jobs?active=true&limit=500")
            while True:
                listed += [Job.model_validate(item) for item in page["items"]]
                if page["next"] is None:
                    break
                page = await here.get(f"/jobs?active=true&limit=500&cursor={page['next']}")
            assert len(listed) == 1001
            whole = Array.model_validate(await here.get(f"/arrays/{array['id']}"))
            rows = array_lines.rows(listed, lambda _: whole)
            assert [row[0] for row in rows] == ["other", "many[1000]"], other
            assert rows[1][-1].startswith("8 running, 992 pending; ")

    run(story())


def test_an_array_is_submitted_once_for_one_key(tmp_path: Path) -> None:
    async def story() -> None:
        async with server(tmp_path, 8) as here:
            body = {"command": ["train"], "workdir": "/tmp", "array": "0-3"}
            first = await here.post("/arrays", json=body, status=201, headers={"Idempotency-Key": "k"})
            again = await here.post("/arrays", json=body, status=200, headers={"Idempotency-Key": "k"})
            assert first["id"] == again["id"]
            assert len(here.loop.jobs) == 4

    run(story())
