"""The store, on SQLite and on PostgreSQL alike."""

from __future__ import annotations

import sqlite3
import threading
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

from shoal.core.errors import ShoalError
from shoal.server.home import Home, HomeInUse, NewerHome
from shoal.server.store.migrate import latest_revision, migrate
from shoal.server.store.store import Store, StoreFull
from shoal.server.store.tables import metadata


def job(**values: Any) -> dict[str, Any]:
    return {
        "name": "a",
        "user": "ada",
        "state": "pending",
        "spec": {},
        "given": [],
        "min_gpus": 1,
        "max_gpus": 1,
        "requested_gpus": 1,
        "resize": "never",
        "model": "m",
        "submitted_s": 1.0,
        "settled_s": 1.0,
        **values,
    }


def test_a_change_and_its_event_are_both_there_or_neither(database: str) -> None:
    store = Store(database)

    def interrupted() -> None:
        with store.change(1.0) as change:
            change.add_job(**job())
            change.event("job.submitted", "submitted")
            raise RuntimeError("midway")

    with pytest.raises(RuntimeError, match="midway"):
        interrupted()
    assert store.jobs() == []
    assert store.events() == []
    with store.change(2.0, actor="ada") as change:
        job_id = change.add_job(**job())
        change.event("job.submitted", "submitted", job=job_id, user="ada")
    assert [j["id"] for j in store.jobs()] == [job_id]
    assert [(e["type"], e["job"], e["actor"]) for e in store.events()] == [("job.submitted", job_id, "ada")]
    store.close()


def test_what_was_written_is_there_after_reopening_and_ids_are_never_used_again(database: str) -> None:
    store = Store(database)
    with store.change(1.0) as change:
        first = change.add_job(**job())
        change.put("k", {"v": [1, 2.5, None, "ö"]})
        change.put("k", {"v": 2})
    store.close()
    store = Store(database)
    assert store.get("k") == {"v": 2}
    with store.change(2.0) as change:
        assert change.add_job(**job()) == first + 1
    store.close()


def test_jobs_are_listed_newest_first_in_pages_and_filtered(database: str) -> None:
    store = Store(database)
    with store.change(1.0) as change:
        ids = [
            change.add_job(
                **job(name=f"j{i}", user="ada" if i % 2 else "ben", state="running" if i > 3 else "failed")
            )
            for i in range(6)
        ]
    assert [j["id"] for j in store.jobs(limit=2)] == ids[:-3:-1]
    assert [j["id"] for j in store.jobs(before_id=ids[2])] == [ids[1], ids[0]]
    assert {j["user"] for j in store.jobs(user="ada")} == {"ada"}
    assert [j["id"] for j in store.active_jobs()] == ids[4:]
    assert store.count_jobs() == {"failed": 4, "running": 2}
    store.close()


def test_a_name_means_the_unfinished_job_before_newer_finished_ones(database: str) -> None:
    store = Store(database)
    with store.change(1.0) as change:
        running = change.add_job(**job(state="running"))
        change.add_job(**job(state="failed"))
        other = change.add_job(**job(state="failed", user="ben"))
    assert store.job_named("a", None)["id"] == running  # type: ignore[index]
    assert store.job_named("a", "ben")["id"] == other  # type: ignore[index]
    assert store.job_named("b", None) is None
    store.close()


def test_events_are_read_from_a_cursor_by_prefix_and_by_owner(database: str) -> None:
    store = Store(database)
    with store.change(5.0) as change:
        for i, (type_, user) in enumerate(
            [("job.a", "ada"), ("job.b", "ben"), ("worker_x", "ada"), ("job.c", "ada")]
        ):
            change.event(type_, str(i), user=user, data={"n": i})
    first = store.events()[0]["id"]
    assert [e["message"] for e in store.events(after_id=first)] == ["1", "2", "3"]
    assert [e["message"] for e in store.events(type="job.", user="ada")] == ["0", "3"]
    assert [e["message"] for e in store.events(type="worker_")] == ["2"], "_ is no wildcard"
    assert [e["message"] for e in store.events(tail=2)] == ["2", "3"]
    assert store.last_event() == (first + 3, 5.0)
    store.close()


def test_a_user_is_always_as_the_last_change_left_it(database: str) -> None:
    store = Store(database)
    assert store.user("ada") is None
    with store.change(5.0) as change:
        change.add_user("ada", "member", 1.0)
    assert store.user("ada")["tickets"] == 1.0
    with store.change(5.0) as change:
        change.update_user("ada", tickets=2.0)
    assert store.user("ada")["tickets"] == 2.0
    with store.change(3.0) as change:
        change.no_later_than(3.0)
    assert store.user("ada")["created_s"] == 3.0
    with store.change(6.0) as change:
        change.delete_user("ada")
    assert store.user("ada") is None


def test_numbers_that_are_not_plain_json_are_read_as_they_were_written(database: str) -> None:
    store, value = Store(database), {"large": 1 << 100, "whole": 3, "half": 0.5, "text": "ä"}
    with store.change(1.0) as change:
        change.put("some", value)
    assert store.get("some") == value


def test_many_rows_are_updated_at_once(database: str) -> None:
    store = Store(database)
    with store.change(1.0) as change:
        ids = [change.add_job(**job()) for _ in range(3)]
    with store.change(2.0) as change:
        change.update_jobs([{"id": i, "gpus": n, "message": f"m{n}"} for n, i in enumerate(ids)])
    assert [(j["gpus"], j["message"]) for j in store.jobs()] == [(2, "m2"), (1, "m1"), (0, "m0")]
    store.close()


def test_migrations_lead_to_exactly_the_tables_of_the_code(database: str) -> None:
    store = Store(database)
    assert compare_metadata(MigrationContext.configure(store._connection), metadata) == []
    store.close()


def test_a_store_of_a_newer_version_is_refused_and_left_alone(database: str) -> None:
    Store(database).close()
    engine = sa.create_engine(database.replace("postgresql://", "postgresql+psycopg://"))
    with engine.begin() as connection:
        connection.execute(sa.text("update alembic_version set version_num = '9999'"))
    with pytest.raises(NewerHome, match="upgrade shoal"):
        Store(database)
    with engine.begin() as connection:
        assert connection.execute(sa.text("select version_num from alembic_version")).scalar() == "9999"
    engine.dispose()


def test_a_copy_is_made_before_a_migration(tmp_path: Path) -> None:
    path = tmp_path / "shoal.db"
    store = Store(f"sqlite:///{path}")
    with store.change(1.0) as change:
        change.put("kept", 1)
    store.close()
    with sqlite3.connect(path) as raw:  # as an older version would have left it
        raw.execute("delete from alembic_version")
        raw.execute("insert into alembic_version values ('0000')")
    engine = sa.create_engine(f"sqlite:///{path}")
    from shoal.server.store import migrate as module

    original = module.ScriptDirectory.walk_revisions
    older = type("Revision", (), {"revision": "0000"})()
    module.ScriptDirectory.walk_revisions = lambda self: [*original(self), older]  # type: ignore[method-assign]
    try:
        with pytest.raises(
            Exception, match="0000"
        ):  # there is no such migration to run; the copy comes first
            migrate(engine, "here")
    finally:
        module.ScriptDirectory.walk_revisions = original  # type: ignore[method-assign]
    copy = path.with_name(f"shoal.db.before-{latest_revision()}")
    with sqlite3.connect(copy) as raw:
        assert raw.execute("select value from settings").fetchall() == [(1,)]
    engine.dispose()


def test_another_database_is_not_taken_for_ours(tmp_path: Path) -> None:
    path = tmp_path / "other.db"
    with sqlite3.connect(path) as raw:
        raw.execute("create table important (x)")
    with pytest.raises(ShoalError, match="other tables"):
        Store(f"sqlite:///{path}")


def test_a_full_disk_is_said_and_nothing_is_changed(tmp_path: Path) -> None:
    store = Store(f"sqlite:///{tmp_path / 'shoal.db'}")
    pages = store._connection.exec_driver_sql("pragma page_count").scalar()
    store._connection.exec_driver_sql(f"pragma max_page_count={pages + 2}")

    def too_much() -> None:
        with store.change(1.0) as change:
            for _ in range(100):
                change.add_job(**job(spec={"x": "y" * 4000}))

    with pytest.raises(StoreFull, match="full"):
        too_much()
    assert store.jobs() == []
    with store.change(1.0) as change:
        change.add_job(**job())
    assert len(store.jobs()) == 1
    store.close()


def test_the_store_is_used_by_one_thread_only(tmp_path: Path) -> None:
    store = Store(f"sqlite:///{tmp_path / 'shoal.db'}")
    seen: list[BaseException] = []

    def other() -> None:
        try:
            store.jobs()
        except RuntimeError as error:
            seen.append(error)

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert len(seen) == 1
    store.close()


def test_a_second_server_on_a_home_refuses_and_a_newer_home_is_refused(tmp_path: Path) -> None:
    first = Home(tmp_path / "h")
    first.take()
    with pytest.raises(HomeInUse, match="in use"):
        Home(tmp_path / "h").take()
    first.release()
    (tmp_path / "h" / "format").write_text("99\n")
    with pytest.raises(NewerHome, match="upgrade"):
        Home(tmp_path / "h").take()
