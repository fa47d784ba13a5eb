"""What the server does with jobs, told as stories; workers are fakes that speak the real protocol."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from shoal.executors.base import NodeInfo

from .fakes import Fleet, run, server


def test_a_gang_starts_together_with_the_usual_variables_and_ends_as_one(tmp_path: Path) -> None:
    async def story() -> None:
        async with server(tmp_path) as here:
            job = (await here.submit("3", name="gang", env={"LR": "1"}))["id"]
            await here.until(lambda: here.state(job) == "running")
            specs = [here.fleet.running[f"{job}.{i}"] for i in range(3)]
            assert [s.env["RANK"] for s in specs] == ["0", "1", "2"]
            assert {s.env["WORLD_SIZE"] for s in specs} == {"3"}
            assert {s.env["MASTER_ADDR"] for s in specs} == {"127.0.0.1"}
            assert len({s.env["MASTER_PORT"] for s in specs}) == 1
            assert {s.gpu for s in specs} == {0, 1, 2}
            assert {s.env["LR"] for s in specs} == {"1"}
            here.fleet.end(f"{job}.0")
            here.fleet.end(f"{job}.1")
            await here.until(lambda: len(here.fleet.running) == 1)
            assert here.state(job) == "running"
            here.fleet.end(f"{job}.2")
            await here.until(lambda: here.state(job) == "succeeded")
            assert here.loop.devices.used == 0

    run(story())


def test_one_failing_rank_takes_the_gang_down_and_the_job_says_why(tmp_path: Path) -> None:
    async def story() -> None:
        async with server(tmp_path) as here:
            job = (await here.submit("2"))["id"]
            await here.until(lambda: here.state(job) == "running")
            here.fleet.end(f"{job}.1", 3)
            await here.until(lambda: here.state(job) == "failed")
            shown = await here.get(f"/jobs/{job}")
            assert shown["message"] == f"worker {job}.1 ended with exit code 3"
            assert here.fleet.running == {}

    run(story())


def test_a_job_that_may_restart_is_started_again_and_no_more_often_than_it_may(tmp_path: Path) -> None:
    async def story() -> None:
        async with server(tmp_path) as here:
            job = (await here.submit("1", max_restarts=1))["id"]
            await here.until(lambda: f"{job}.0" in here.fleet.running)
            here.fleet.end(f"{job}.0", 1)
            await here.until(lambda: f"{job}.1" in here.fleet.running)
            assert here.fleet.running[f"{job}.1"].env["SHOAL_ATTEMPT"] == "1"
            here.fleet.end(f"{job}.1", None, "SIGSEGV")
            await here.until(lambda: here.state(job) == "failed")
            assert "SIGSEGV" in (await here.get(f"/jobs/{job}"))["message"]

    run(story())


def test_a_gpu_is_given_to_the_next_owner_only_when_the_last_has_let_it_go(tmp_path: Path) -> None:
    async def story() -> None:
        fleet = Fleet(2)
        fleet.stubborn = True
        async with server(tmp_path, policy="srtf", fleet=fleet) as here:
            long = (await here.submit("2", resize="restart", expected_s=1000, name="long"))["id"]
            await here.until(lambda: here.state(long) == "running")
            short = (await here.submit("2", expected_s=1, name="short"))["id"]
            await here.until(lambda: len(fleet.told) == 2)
            why = await here.get(f"/jobs/{short}/why")
            assert why["reason"]["code"] == "WaitingForRelease"
            assert here.gpus(short) == 0
            fleet.end(f"{long}.0", None, "SIGTERM")
            await here.until(lambda: len(fleet.running) == 1)
            assert here.gpus(short) == 0, "a gang is never started in part"
            fleet._ended(f"{long}.1", None, "SIGTERM", True)
            await here.until(lambda: here.state(short) == "running")
            assert here.state(long) == "pending"

    run(story())


def test_a_fixed_job_that_is_preempted_stands_still_and_goes_on_later(tmp_path: Path) -> None:
    async def story() -> None:
        async with server(tmp_path, 2, policy="srtf") as here:
            long = (await here.submit("2", expected_s=1000))["id"]
            await here.until(lambda: here.state(long) == "running")
            short = (await here.submit("2", expected_s=1))["id"]
            await here.until(lambda: here.state(short) == "running")
            assert here.fleet.suspended == {f"{long}.0", f"{long}.1"}
            assert here.state(long) == "pending"
            for rank in range(2):
                here.fleet.end(f"{short}.{rank}")
            await here.until(lambda: here.state(long) == "running")
            assert here.fleet.suspended == set()
            assert here.fleet.started.count(f"{long}.0") == 1

    run(story())


def test_pause_gives_the_gpus_to_others_and_resume_waits_its_turn(tmp_path: Path) -> None:
    async def story() -> None:
        async with server(tmp_path, 1) as here:
            first = (await here.submit("1"))["id"]
            second = (await here.submit("1"))["id"]
            await here.until(lambda: here.state(first) == "running")
            assert (await here.post(f"/jobs/{first}/pause"))["state"] == "paused"
            await here.until(lambda: here.state(second) == "running")
            assert (await here.get(f"/jobs/{first}"))["reason"]["code"] == "Held"
            await here.post(f"/jobs/{first}/resume")
            await here.until(lambda: here.state(first) == "pending")
            here.fleet.end(f"{second}.0")
            await here.until(lambda: here.state(first) == "running")

    run(story())


@pytest.mark.parametrize("when", ["pending", "running", "paused"])
def test_cancel_works_in_every_state_and_leaves_nothing(tmp_path: Path, when: str) -> None:
    async def story() -> None:
        async with server(tmp_path, 1) as here:
            if when == "pending":
                await here.submit("1")
            job = (await here.submit("1"))["id"]
            await here.until(lambda: here.loop.decided_s is not None)
            if when == "running":
                await here.until(lambda: here.state(job) == "running")
            if when == "paused":
                await here.post(f"/jobs/{job}/pause")
            await here.post(f"/jobs/{job}/cancel")
            await here.until(lambda: here.state(job) == "cancelled")
            assert not any(w.startswith(f"{job}.") for w in here.fleet.running)
            assert (await here.post(f"/jobs/{job}/cancel", status=409))["error"]["code"] == "conflict"

    run(story())


def test_a_live_job_grows_when_another_ends_and_shrinks_when_another_arrives(tmp_path: Path) -> None:
    async def story() -> None:
        async with server(tmp_path, policy="max-min") as here:
            first = (await here.submit("1..4"))["id"]
            await here.until(lambda: here.state(first) == "running")
            assert here.gpus(first) == 4
            second = (await here.submit("1..4"))["id"]
            await here.until(lambda: here.state(second) == "running", train=(first, second))
            assert (here.gpus(first), here.gpus(second)) == (2, 2)
            here.fleet.step(second, total=1)
            await here.until(lambda: here.state(second) == "succeeded", train=(first,))
            await here.until(lambda: here.loop.jobs[first].size == 4, train=(first,))
            shown = await here.get(f"/jobs/{first}")
            assert shown["resizes"] == 2
            assert shown["step"] > 0
            assert [w["rank"] for w in shown["workers"] if w["state"] == "active"] == [0, 1, 2, 3]

    run(story())


def test_a_killed_worker_is_replaced_while_the_others_train_on(tmp_path: Path) -> None:
    async def story() -> None:
        async with server(tmp_path, 2, policy="max-min") as here:
            job = (await here.submit("1..2"))["id"]
            await here.until(lambda: here.state(job) == "running")
            here.fleet.end(f"{job}.1", None, "SIGKILL")
            await here.until(lambda: f"{job}.2" in here.fleet.running, train=(job,))
            await here.until(lambda: here.loop.jobs[job].size == 2, train=(job,))
            types = [e["type"] for e in (await here.get("/events", params={"limit": 1000}))["items"]]
            assert "worker.lost" in types
            assert here.state(job) == "running"

    run(story())


def test_a_paused_live_job_saves_its_state_and_resumes_on_new_workers(tmp_path: Path) -> None:
    async def story() -> None:
        async with server(tmp_path, 2, policy="max-min") as here:
            job = (await here.submit("1..2"))["id"]
            await here.until(lambda: here.state(job) == "running")
            await here.post(f"/jobs/{job}/pause")
            await here.until(lambda: not here.fleet.running, train=(job,))
            assert here.loop.devices.used == 0
            assert here.loop.jobs[job].coordinator["paused"].endswith("paused.pt")
            await here.post(f"/jobs/{job}/resume")
            await here.until(lambda: here.state(job) == "running", train=(job,))

    run(story())


def test_a_live_job_that_is_paused_before_its_first_step_is_paused_and_not_failed(tmp_path: Path) -> None:
    async def story() -> None:
        async with server(tmp_path, 2, policy="max-min") as here:
            # It is connected and waits for its fellow, which never becomes ready: there is no generation yet.
            job = (await here.submit("2..2", resize="live"))["id"]
            live = here.loop.jobs[job]
            await here.until(lambda: len(here.fleet.live) == 2)
            here.fleet.live[f"{job}.1"].end()
            await here.until(lambda: live.workers[f"{job}.0"].state == "ready")
            assert live.generation == 0
            leaving: list[str] = []  # who was asked over the wire, and ends by itself with exit code 0
            end, here.fleet.end = here.fleet.end, lambda worker, *_: leaving.append(worker)  # type: ignore[method-assign]
            await here.post(f"/jobs/{job}/pause")
            await here.until(lambda: here.fleet.running.keys() == {f"{job}.0"} and leaving)
            end(leaving[0], 0)
            await here.until(lambda: not live.workers and here.gpus(job) == 0)
            await asyncio.sleep(0.02)
            assert here.state(job) == "paused"
            await here.post(f"/jobs/{job}/resume")
            await here.until(lambda: here.state(job) == "running")

    run(story())


def test_a_command_that_never_joins_its_live_job_fails_with_advice(tmp_path: Path) -> None:
    async def story() -> None:
        async with server(tmp_path, 1, policy="max-min") as here:
            job = (await here.submit("1..2"))["id"]
            await here.until(lambda: f"{job}.0" in here.fleet.running)
            here.fleet.live[f"{job}.0"].end()
            here.fleet.end(f"{job}.0", 0)
            await here.until(lambda: here.state(job) in ("failed", "succeeded"))
            assert "shoal.torch" in (await here.get(f"/jobs/{job}"))["message"]

    run(story())


def test_the_policy_is_changed_while_jobs_run_and_their_shares_stay_until_it_decides(tmp_path: Path) -> None:
    async def story() -> None:
        async with server(tmp_path, policy="fifo") as here:
            first = (await here.submit("1..4", requested_gpus=4))["id"]
            second = (await here.submit("1..4", requested_gpus=4))["id"]
            await here.until(lambda: here.state(first) == "running")
            assert here.gpus(second) == 0
            await here.call("PUT", "/policy", json={"name": "max-min"})
            await here.until(lambda: here.state(second) == "running", train=(first, second))
            assert (here.gpus(first), here.gpus(second)) == (2, 2)
            error = await here.call("PUT", "/policy", json={"name": "max-mim"}, status=422)
            assert "max-min" in error["error"]["message"]

    run(story())


def test_a_policy_that_raises_is_replaced_and_no_job_is_lost(tmp_path: Path) -> None:
    async def story() -> None:
        async with server(tmp_path, policy="max-min") as here:
            job = (await here.submit("1"))["id"]
            await here.until(lambda: here.state(job) == "running")

            def broken(*_: object) -> None:
                raise ZeroDivisionError

            here.loop.scheduler.policy.decide = broken
            other = (await here.submit("1"))["id"]
            await here.until(lambda: here.state(other) == "running")
            assert here.loop.policy_name == "fifo"
            assert any("max-min" in w for w in (await here.get("/status"))["warnings"])
            here.loop.scheduler.policy.decide = broken  # and should fifo itself fail once
            third = (await here.submit("1"))["id"]
            await here.until(lambda: here.state(third) == "running")

    run(story())


def test_why_names_who_is_ahead_when_it_may_start_and_the_smallest_change(tmp_path: Path) -> None:
    async def story() -> None:
        async with server(tmp_path) as here:
            first = (await here.submit("3", expected_s=100, name="first"))["id"]
            await here.until(lambda: here.state(first) == "running")
            second = (await here.submit("2", name="second"))["id"]
            await here.until(lambda: second in here.loop.scheduler.jobs)
            why = await here.get(f"/jobs/{second}/why")
            assert why["reason"]["code"] == "WaitingForCapacity"
            assert [j["name"] for j in why["ahead"]] == ["first"]
            assert 0 < why["starts_in"]["low_s"] <= why["starts_in"]["high_s"] <= 200
            assert [(c["change"], c["value"]) for c in why["could"]] == [
                ("min_gpus", 1),
                ("finish_job", "first"),
            ]
            plan = await here.post("/plan", json={"spec": {"command": ["x"], "gpus": "1"}})
            assert plan["verdict"] == "starts"
            assert here.loop.scheduler.jobs.keys() == {first, second}, "asking changes nothing"

    run(story())


def test_bursts_are_decided_on_together(tmp_path: Path) -> None:
    async def story() -> None:
        async with server(tmp_path, 50) as here:
            before = here.loop.scheduler.plans
            await asyncio.gather(*(here.submit("1") for _ in range(40)))
            await here.until(lambda: len(here.fleet.running) == 40)
            assert here.loop.scheduler.plans - before < 30

    run(story())


def test_shares_are_kept_by_user_and_type(tmp_path: Path) -> None:
    async def story() -> None:
        nodes = (NodeInfo("a", 2, "v100", False, ("x", "y")), NodeInfo("b", 2, "k80", False, ("z", "w")))
        async with server(tmp_path, nodes, policy="max-min") as here:
            await here.add_user("ada", tickets=3)
            job = (await here.submit("2", user="ada", gpu_types=["k80"]))["id"]
            await here.until(lambda: here.state(job) == "running")
            assert {s.node for s in here.fleet.running.values()} == {"b"}
            lines = {s["user"]: s for s in (await here.get("/shares"))["items"]}
            assert lines["ada"]["gpus"] == 2
            assert lines["ada"]["tickets"] == 3
            assert lines["ada"]["entitled_gpus"] == 2

    run(story())


def test_a_server_that_stood_still_does_not_take_its_workers_for_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        from shoal.wire import service

        offset_s = [0.0]
        real = service.time.monotonic

        class Shifted:
            monotonic = staticmethod(lambda: real() + offset_s[0])

        monkeypatch.setattr(service, "time", Shifted)
        async with server(tmp_path, 2, policy="max-min") as here:
            job = (await here.submit("1..2"))["id"]
            await here.until(lambda: here.state(job) == "running")
            await here.until(lambda: here.loop.jobs[job].progress.step, train=(job,))
            offset_s[0] = 3600.0  # the machine slept for an hour
            ticks = here.loop.runners["live"].service.jobs[str(job)].tick
            seen: list[int] = []
            handle = here.loop.runners["live"].service.jobs[str(job)]
            monkeypatch.setattr(handle, "tick", lambda: (seen.append(1), ticks()))
            # No one speaks before the next tick: as after a stop of the server, whose inbox it has not read yet.
            await here.until(lambda: len(seen) >= 2)
            events = await here.get("/events", params={"type": "worker.lost"})
            assert events["items"] == []
            assert here.loop.jobs[job].size == 2

    run(story())


@pytest.mark.parametrize("wanted", [True, False])
def test_a_straggler_is_replaced_where_its_owner_wishes_and_a_gpu_is_free(
    tmp_path: Path, wanted: bool
) -> None:
    async def story() -> None:
        async with server(tmp_path, 3, policy="max-min") as here:
            job = (await here.submit("2..2", resize="live", replace_stragglers=wanted))["id"]
            await here.until(lambda: here.state(job) == "running")
            here.fleet.slow[f"{job}.1"] = 3.0
            live = here.loop.jobs[job]

            def kinds() -> dict[str, dict[str, object]]:
                return {
                    e["type"]: e["data"]
                    for e in here.control.store.events(job=job, type="worker.", limit=1000)
                }

            await here.until(lambda: "worker.straggler" in kinds(), train=(job,))
            reason = kinds()["worker.straggler"]["reason"]
            assert isinstance(reason, dict)
            assert reason["code"] == "Straggler"
            assert reason["evidence"]["relative_speed"] < 0.8
            if not wanted:
                assert live.workers.keys() == {f"{job}.0", f"{job}.1"}
                return
            await here.until(lambda: live.workers.keys() == {f"{job}.0", f"{job}.2"}, train=(job,))
            await here.until(lambda: live.size == 2, train=(job,))
            assert kinds()["worker.replaced"]["by"] == f"{job}.2"
            assert {w.state for w in live.workers.values()} == {"active"}
            assert (live.life.restarts, here.state(job)) == (0, "running")
            assert "worker.lost" not in kinds(), "it left at a switch; nothing broke"

    run(story())


def test_a_straggler_stays_where_no_gpu_is_free(tmp_path: Path) -> None:
    async def story() -> None:
        async with server(tmp_path, 2, policy="max-min") as here:
            job = (await here.submit("2..2", resize="live", replace_stragglers=True))["id"]
            await here.until(lambda: here.state(job) == "running")
            here.fleet.slow[f"{job}.1"] = 3.0
            await here.until(lambda: here.control.store.events(type="worker.kept"), train=(job,))
            assert here.loop.jobs[job].workers.keys() == {f"{job}.0", f"{job}.1"}

    run(story())


def test_a_job_that_would_not_be_faster_with_more_is_told_so_and_its_own_maximum_stays(
    tmp_path: Path,
) -> None:
    async def story() -> None:
        async with server(tmp_path, 4, policy="max-min") as here:
            job = (await here.submit("1..4"))["id"]
            await here.until(lambda: here.state(job) == "running")
            live = here.loop.jobs[job]
            live.gpu_type = "virtual"
            for gpus, step_s in ((1, 1.0), (2, 0.5), (3, 0.8), (4, 0.9)):
                for _ in range(30):
                    here.loop.profiles.measured(live, gpus, 1, step_s)
            here.loop.scheduler.cool_down_s = 0.0
            await here.until(lambda: live.size == 2, train=(job,))
            reason = (await here.get(f"/jobs/{job}"))["reason"]
            assert reason["code"] == "NotWorthIt"
            assert reason["evidence"] == {"useful_gpus": 2, "max_gpus": 4}
            assert "faster" in (await here.get(f"/jobs/{job}/why"))["sentence"]

    run(story())


def test_a_job_whose_own_workers_are_ending_says_that_it_waits_for_them(tmp_path: Path) -> None:
    async def story() -> None:
        fleet = Fleet(4)
        fleet.stubborn = True
        async with server(tmp_path, fleet=fleet, policy="max-min") as here:
            job = (await here.submit("1..4", resize="restart"))["id"]
            await here.until(lambda: here.state(job) == "running")
            await here.post(f"/jobs/{job}/scale", json={"max": 2})
            await here.until(lambda: len(fleet.told) == 4)
            reason = (await here.get(f"/jobs/{job}"))["reason"]
            assert reason["code"] == "WaitingForRelease"
            assert reason["evidence"] == {"leaving": 4}
            for worker in list(fleet.running):
                fleet._ended(worker, None, "SIGTERM", True)
            await here.until(lambda: here.gpus(job) == 2 and here.state(job) == "running")
            assert (await here.get(f"/jobs/{job}"))["reason"] is None

    run(story())


@pytest.mark.parametrize("code", [7, None])
def test_a_worker_that_fails_or_loses_its_keeper_while_it_is_told_to_end_is_no_success(
    tmp_path: Path, code: int | None
) -> None:
    """Its keeper cannot say that it was told to end: the command failed just before, or the keeper was killed."""

    async def story() -> None:
        async with server(tmp_path) as here:
            here.fleet.stubborn = True
            cancelled = (await here.submit("1"))["id"]
            paused = (await here.submit("1", resize="restart"))["id"]
            await here.until(lambda: here.state(cancelled) == here.state(paused) == "running")
            await here.post(f"/jobs/{cancelled}/cancel")
            await here.post(f"/jobs/{paused}/pause")
            await here.until(lambda: {f"{cancelled}.0", f"{paused}.0"} <= set(here.fleet.told))
            here.fleet.end(f"{cancelled}.0", code)
            here.fleet.end(f"{paused}.0", code)
            await here.until(lambda: here.state(cancelled) == "cancelled")
            await here.until(lambda: not here.loop.jobs[paused].workers)
            assert here.state(paused) == "paused"
            await here.post(f"/jobs/{paused}/resume")
            await here.until(lambda: f"{paused}.1" in here.fleet.running)

    run(story())


def test_cancelling_a_job_that_stands_still_takes_nothing_from_the_owner_of_its_gpus(tmp_path: Path) -> None:
    async def story() -> None:
        fleet = Fleet(2)
        async with server(tmp_path, fleet=fleet, policy="srtf", kill=True) as here:
            long = (await here.submit("2", expected_s=1000))["id"]
            await here.until(lambda: here.state(long) == "running")
            short = (await here.submit("2", expected_s=1))["id"]
            await here.until(lambda: here.state(short) == "running")
            fleet.stubborn = True
            await here.post(f"/jobs/{long}/cancel")
            assert (here.gpus(long), here.gpus(short)) == (0, 2)
            assert here.loop.devices.used == 2
        async with server(tmp_path, fleet=fleet, policy="srtf") as here:  # it can be taken over as it is
            await here.until(lambda: fleet.told.count(f"{long}.0") >= 2)
            assert (here.gpus(long), here.gpus(short)) == (0, 2)
            for rank in range(2):
                fleet._ended(f"{long}.{rank}", None, "SIGTERM", True)
            await here.until(lambda: here.state(long) == "cancelled")
            assert here.state(short) == "running"

    run(story())
