"""A restored backup, an empty database and a clock that was wrong lose nothing."""

from __future__ import annotations

import shutil
import sqlite3
import time
from pathlib import Path

import pytest

from shoal.executors.keeper import start_time
from shoal.server.high_water import HighWater, continue_ids
from shoal.server.home import Home
from shoal.server.loop.clock import Clock, go_on
from shoal.server.record_check import WrongRecord, check_record, refuse_missing_database
from shoal.server.store.store import Store

from .fakes import Fleet, run, server
from .test_crash import RealServer


def test_a_restored_backup_gives_no_id_twice_and_removes_no_directory(tmp_path: Path) -> None:
    home, backup = tmp_path / "home", tmp_path / "backup.db"

    async def story() -> None:
        fleet = Fleet(1)
        async with server(home, fleet=fleet) as here:
            old = (await here.submit("1"))["id"]
        shutil.copy(home / "shoal.db", backup)
        async with server(home, fleet=fleet) as here:
            new = (await here.submit("1"))["id"]
            checkpoint = here.control.home.job(new) / "checkpoint.pt"
            checkpoint.write_text("hours of training")
        for path in home.glob("shoal.db*"):
            path.unlink()
        shutil.copy(backup, home / "shoal.db")
        async with server(home, fleet=fleet) as here:
            assert any(f"does not know 1 job of this home ({new})" in w for w in here.loop.warnings)
            assert {row["id"] for row in here.control.store.jobs(limit=10)} == {old}
            next_one = (await here.submit("1"))["id"]
            assert next_one > new
            assert checkpoint.read_text() == "hours of training"

    run(story())


def test_a_backup_contains_the_keys_of_webhooks_but_no_tokens_and_no_secrets_of_jobs(tmp_path: Path) -> None:
    backup = tmp_path / "backup.db"

    async def story() -> None:
        async with server(tmp_path / "home", webhook_hosts=("127.0.0.0/8",)) as here:
            hook = await here.post("/webhooks", json={"url": "http://127.0.0.1:1/path"}, status=201)
            await here.submit("1", env={"PLACE": "in the environment"}, secrets={"KEY": "hunter2"})
            with sqlite3.connect(tmp_path / "home" / "shoal.db") as source, sqlite3.connect(backup) as target:
                source.backup(target)
            content = backup.read_bytes().decode(errors="replace")
            for found in (hook["secret"], "http://127.0.0.1:1/path", "in the environment"):
                assert found in content
            for absent in (here.tokens["admin"], "hunter2"):
                assert absent not in content

    run(story())


def test_an_id_continues_after_the_directories_on_both_databases(database: str, tmp_path: Path) -> None:
    store, home = Store(database), Home(tmp_path / "home")
    home.take()
    for job_id in (7, 41):
        home.job(job_id).mkdir()
    with pytest.raises(WrongRecord, match="2 jobs, but the database is missing, empty or new"):
        check_record(home, store, 0.0)
    row = {
        "name": "a", "user": "ada", "state": "pending", "spec": {}, "given": [], "min_gpus": 1, "max_gpus": 1,
        "requested_gpus": 1, "resize": "never", "model": "m", "submitted_s": 0.0, "settled_s": 0.0,
    }  # fmt: skip
    with store.change(0.0) as change:
        change.add_job(**row)
    assert check_record(home, store, 0.0) == [7, 41]
    with store.change(0.0) as change:
        assert change.add_job(**row) == 42
    store.close()
    home.release()


def test_ids_of_events_jobs_arrays_and_tokens_are_not_given_again_after_a_restore(tmp_path: Path) -> None:
    home, backup = tmp_path / "home", tmp_path / "backup.db"
    array = {"command": ["true"], "workdir": "/", "gpus": "1", "array": "0-1"}

    async def story() -> None:
        fleet = Fleet(1)
        async with server(home, fleet=fleet) as here:
            first = (await here.submit("1"))["id"]
            with sqlite3.connect(home / "shoal.db") as source, sqlite3.connect(backup) as target:
                source.backup(target)
            made = await here.post("/arrays", json=array, status=201)
            last_job = here.control.store.last_job()
            assert last_job == first + 2
            token = await here.post("/tokens", json={}, status=201)
        with sqlite3.connect(home / "shoal.db") as connection:
            (last,) = connection.execute("select max(id) from events").fetchone()
        for path in home.glob("shoal.db*"):
            path.unlink()
        shutil.copy(backup, home / "shoal.db")
        for job in range(first + 1, last_job + 1):
            shutil.rmtree(home / "jobs" / str(job))  # it may have removed its own
        async with server(home, fleet=fleet) as here:
            assert {row["id"] for row in here.control.store.jobs(limit=10)} == {first}
            assert (await here.submit("1"))["id"] > last_job
            assert (await here.post("/arrays", json=array, status=201))["id"] > made["id"]
            new = await here.get("/events", params={"cursor": str(last)})
            assert "job.submitted" in {event["type"] for event in new["items"]}, "a client misses none"
            assert (await here.post("/tokens", json={}, status=201))["id"] > token["id"]

    run(story())


def test_no_id_is_left_out_if_the_database_is_the_last_one(tmp_path: Path) -> None:
    async def story() -> None:
        async with server(tmp_path, 1, kill=True) as here:
            await here.submit("1")
        async with server(tmp_path, 1) as here:
            events = (await here.get("/events", params={"limit": 1000}))["items"]
            assert [event["id"] for event in events] == list(range(1, len(events) + 1))

    run(story())


def test_ids_continue_after_the_mark_on_both_databases(database: str, tmp_path: Path) -> None:
    store, mark = Store(database), HighWater(tmp_path / "last-event")
    with store.change(0.0) as change:
        change.event("server.started", "the only one in the backup")
    mark.write(store.last_event_id + 10)
    assert continue_ids(store, mark, 0.0) == 10
    with store.change(0.0) as change:
        change.event("server.started", "after the restore")
    assert store.last_event_id > mark.read()
    mark.write(store.last_event_id)
    assert continue_ids(store, mark, 0.0) == 0
    mark.close()
    store.close()


def test_a_worker_that_an_agent_ends_because_nobody_knows_it_is_reported(tmp_path: Path) -> None:
    async def story() -> None:
        async with server(tmp_path, 1) as here:
            job = (await here.submit("1"))["id"]
            await here.until(lambda: here.state(job) == "running")
            here.control._agent_ends_unknown("far", [f"{job}.0"])  # on record: its end was not heard of yet
            here.control._agent_ends_unknown("far", [f"{job}.7", "99.0"])
            events = (await here.get("/events", params={"type": "worker.unknown"}))["items"]
            assert [event["data"]["workers"] for event in events] == [[f"{job}.7", "99.0"]]
            assert any("agent far ends 2 workers" in warning for warning in here.loop.warnings)

    run(story())


def test_a_clock_that_was_once_far_ahead_can_be_set_back(database: str) -> None:
    now_s, year_s = time.time(), 400 * 86400.0
    store = Store(database)
    wrong = go_on(store, Clock(wall=lambda: now_s + year_s), boot="one")
    with store.change(wrong.now_s()) as change:
        change.add_user("ada", "user", 1.0)
        change.add_token("ada", "hash", "", wrong.now_s() + 100.0)
        change.event("server.started", "in the future")
    assert go_on(store, boot="two").now_s() >= now_s + year_s, "without a reset time never goes back"
    right = go_on(store, boot="three", reset=True)
    assert abs(right.now_s() - time.time()) < 60
    token = store.tokens("ada")[0]
    assert now_s < token["expires_s"] < now_s + 200.0
    assert all(event["at_s"] <= right.now_s() for event in store.events(limit=10))
    store.close()


def test_workers_that_a_restored_record_does_not_know_are_ended_before_their_gpu_is_given_away(
    tmp_path: Path,
) -> None:
    """Two jobs: one was on record but had not begun, the other was submitted after the backup."""
    home, backup = tmp_path / "home", tmp_path / "backup.db"
    live = RealServer(home, "--gpus", "2", "--policy", "fifo")
    try:
        first = live.submit("sleep", "1000", gpus="2")["id"]
        live.until(first, "running")
        begins_later = live.submit("sh", "-c", "sleep 1000", gpus="1")["id"]
        with sqlite3.connect(home / "shoal.db") as source, sqlite3.connect(backup) as target:
            source.backup(target)
        live.http.post(f"/jobs/{first}/cancel")
        unknown = live.submit("sleep", "1000", gpus="1")["id"]
        pids = [live.until(job, "running")["workers"][0]["pid"] for job in (begins_later, unknown)]
        live.kill()
        for path in home.glob("shoal.db*"):
            path.unlink()
        shutil.copy(backup, home / "shoal.db")

        live.up()
        assert all(start_time(pid) is None for pid in pids)
        warnings = live.http.get("/status").json()["warnings"]
        assert any(f"{begins_later}.0, {unknown}.0" in warning for warning in warnings)
        live.http.post(f"/jobs/{first}/cancel")
        worker = live.until(begins_later, "running")["workers"][-1]
        assert worker["id"] == f"{begins_later}.1", "the id of the first worker is not used again"
        assert live.submit("true", gpus="1")["id"] > unknown
    finally:
        live.down()


def test_a_home_with_jobs_and_no_database_is_refused_before_one_is_made(tmp_path: Path) -> None:
    home = Home(tmp_path)
    home.take()
    home.job(3).mkdir()
    with pytest.raises(WrongRecord, match="has 1 job, but the database is missing"):
        refuse_missing_database(home)
    assert not home.database.exists()
    home.release()
