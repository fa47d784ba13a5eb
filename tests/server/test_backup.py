"""A restored backup, an empty database and a clock that was wrong lose nothing."""

from __future__ import annotations

import shutil
import sqlite3
import time
from pathlib import Path

import pytest

from shoal.executors.keeper import start_time
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
        assert live.submit("true", gpus="1")["id"] == unknown + 1
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
