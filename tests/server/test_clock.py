"""Lengths of time are measured by a clock that no one sets; the machine's clock is only for people to read."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.executors import keeper
from shoal.executors.base import Exit
from shoal.executors.local import LocalExecutor
from shoal.executors.logs import read_lines
from shoal.server.loop import clock as clock_module
from shoal.server.loop.clock import Clock

from .fakes import Fleet, Here, run, server


class Machine:
    """A machine whose clock can be set; its steady clock can only go on."""

    def __init__(self) -> None:
        self.set_by_s, self.passed_s = 0.0, 0.0

    def time(self) -> float:
        return time.time() + self.set_by_s + self.passed_s

    def monotonic(self) -> float:
        return time.monotonic() + self.passed_s


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine()
    monkeypatch.setattr(clock_module, "time", made)
    return made


def test_the_clock_never_goes_back_and_ignores_jumps_of_the_machines_clock() -> None:
    wall, steady = [1000.0], [5.0]
    clock = Clock(2000.0, wall=lambda: wall[0], steady=lambda: steady[0])
    assert clock.now_s() == 2000.0, "the store knows of a later moment than the machine's clock"
    wall[0], steady[0] = -1e6, 6.0
    assert clock.now_s() == 2001.0


@pytest.mark.parametrize("set_by_s", [-3600.0, 0.0, 3600.0])
def test_a_clock_that_is_set_while_no_server_runs_changes_no_length_of_time(
    tmp_path: Path, machine: Machine, set_by_s: float
) -> None:
    async def story() -> None:
        fleet = Fleet(1)
        async with server(tmp_path, fleet=fleet) as here:
            runs = (await here.submit("1"))["id"]
            waits = (await here.submit("1"))["id"]
            await here.until(lambda: here.state(runs) == "running")
            machine.passed_s += 50.0
        machine.set_by_s = set_by_s
        machine.passed_s += 100.0
        async with server(tmp_path, fleet=fleet) as here:
            machine.passed_s += 10.0
            job = await here.get(f"/jobs/{runs}")
            assert 160 <= job["running_s"] < 175
            assert 160 <= job["gpu_s"] < 175
            assert 160 <= (await here.get(f"/jobs/{waits}"))["waiting_s"] < 175
            shares = (await here.get("/shares"))["items"]
            assert sum(line["received_gpu_s"] for line in shares) == pytest.approx(job["gpu_s"], abs=15)
            events = (await here.get("/events", params={"limit": 1000}))["items"]
            assert [e["at"] for e in events] == sorted(e["at"] for e in events)

    run(story())


async def received_and_booked(here: Here) -> tuple[float, float]:
    """GPU seconds of all users by the ledger, and those of all jobs."""
    shares, jobs = (await here.get("/shares"))["items"], (await here.get("/jobs"))["items"]
    return sum(line["received_gpu_s"] for line in shares), sum(job["gpu_s"] for job in jobs)


def test_users_receive_nothing_while_a_decision_is_made(tmp_path: Path, machine: Machine) -> None:
    """The first decision of a new installation may take a minute: jobs have no GPUs before its end."""

    async def story() -> None:
        async with server(tmp_path, 2) as here:
            step = here.loop.scheduler.step

            def slow_step(*args: Any, **kwargs: Any) -> Any:
                machine.passed_s += 500.0
                return step(*args, **kwargs)

            here.loop.scheduler.step = slow_step  # type: ignore[method-assign]
            job = (await here.submit("2"))["id"]
            await here.until(lambda: here.state(job) == "running")
            here.loop.scheduler.step = step  # type: ignore[method-assign]
            machine.passed_s += 1000.0
            received, booked = await received_and_booked(here)
            assert booked >= 2000.0
            assert received == pytest.approx(booked, abs=60)

    run(story())


def test_users_receive_nothing_while_no_server_runs_that_has_stopped_its_jobs(
    tmp_path: Path, machine: Machine
) -> None:
    async def story() -> None:
        fleet = Fleet(2)
        async with server(tmp_path, fleet=fleet, stop_jobs=True) as here:
            job = (await here.submit("2"))["id"]
            await here.until(lambda: here.state(job) == "running")
            machine.passed_s += 1000.0
        machine.passed_s += 5000.0
        async with server(tmp_path, fleet=fleet) as here:
            await here.until(lambda: here.state(job) == "running")
            machine.passed_s += 100.0
            received, booked = await received_and_booked(here)
            assert booked >= 2200.0
            assert received == pytest.approx(booked, abs=60)

    run(story())


def test_after_a_reboot_the_time_in_between_is_that_of_the_wall_clock(
    tmp_path: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        async with server(tmp_path, 1, kill=True) as here:
            await here.submit("1")
            waits = (await here.submit("1"))["id"]
            await here.until(lambda: waits in here.loop.scheduler.jobs)
        monkeypatch.setattr(clock_module, "boot_id", lambda: "another")
        machine.set_by_s = 500.0
        async with server(tmp_path, 1) as here:
            assert 500 <= (await here.get(f"/jobs/{waits}"))["waiting_s"] < 515

    run(story())


def test_doctor_says_that_the_machines_clock_was_set(tmp_path: Path, machine: Machine) -> None:
    async def story() -> None:
        async with server(tmp_path, 1) as here:
            checks = {c["name"]: c for c in (await here.get("/doctor"))["checks"]}
            assert checks["clock"]["status"] == "ok"
            machine.set_by_s = -7200.0
            checks = {c["name"]: c for c in (await here.get("/doctor"))["checks"]}
            assert checks["clock"]["status"] == "warning"
            assert "-7200 s" in checks["clock"]["message"]

    run(story())


def test_a_clock_that_was_once_far_ahead_is_reported_with_the_way_back(
    tmp_path: Path, machine: Machine
) -> None:
    async def story() -> None:
        machine.set_by_s = 400 * 86400.0
        async with server(tmp_path, 1):
            pass
        machine.set_by_s = 0.0
        async with server(tmp_path, 1) as here:
            assert any("400.0 days ahead" in warning for warning in here.loop.warnings)
            checks = {c["name"]: c for c in (await here.get("/doctor"))["checks"]}
            assert checks["clock"]["status"] == "warning"
            assert "--reset-clock" in checks["clock"]["hint"]

    run(story())


def test_a_worker_that_ended_while_no_server_ran_is_accounted_for_until_then(
    tmp_path: Path, machine: Machine
) -> None:
    async def story() -> None:
        fleet = Fleet(1)
        async with server(tmp_path, fleet=fleet, kill=True) as here:
            job = (await here.submit("1"))["id"]
            await here.until(lambda: here.state(job) == "running")
        fleet.running.clear()
        fleet.exits[f"{job}.0"] = Exit(f"{job}.0", 0, None, "", ago_s=70.0)
        machine.passed_s, machine.set_by_s = 100.0, 86400.0
        async with server(tmp_path, fleet=fleet) as here:
            await here.until(lambda: here.state(job) == "succeeded")
            assert 30 <= (await here.get(f"/jobs/{job}"))["running_s"] < 45

    run(story())


def test_a_keeper_tells_how_long_ago_its_worker_ended_whatever_the_clock_says(tmp_path: Path) -> None:
    keeper.Keeper(str(tmp_path), {"log_file_bytes": 1000, "log_files": 2}).finish(0, None, "")
    found = LocalExecutor(1)._exit_of("1.0", tmp_path)
    assert found.ago_s is not None
    assert 0 <= found.ago_s < 60
    keeper.write_json(
        str(tmp_path / "exit"),
        {"code": 0, "signal": None, "why": "", "told": False, "steady_s": 1e9, "boot": "another"},
    )
    assert LocalExecutor(1)._exit_of("1.0", tmp_path).ago_s is None, (
        "a steady clock says nothing over a reboot"
    )


def test_lines_of_a_log_stay_in_order_when_the_clock_is_set_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = keeper.Log(str(tmp_path), 10**6, 2)
    log.take(b"first\n")
    behind = SimpleNamespace(**{**vars(time), "time": lambda: 0.0})
    monkeypatch.setattr(keeper, "time", behind)
    log.take(b"second\n")
    first, second = read_lines(tmp_path, 0)
    assert (first.text, second.text) == ("first", "second")
    assert first.at_s <= second.at_s
