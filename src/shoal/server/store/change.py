"""One transaction of the store: what it may add and change, and the events that tell of it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from shoal.server.store import tables as t

Row = dict[str, Any]
ACTIVE_STATES = ("pending", "starting", "running", "paused", "stopping")

# Made once: the values are given when they are executed, so that nothing is compiled again.
_ADD_JOBS = t.jobs.insert().returning(t.jobs.c.id, sort_by_parameter_order=True)
_UPDATE_JOB = t.jobs.update().where(t.jobs.c.id == sa.bindparam("_id"))
_ADD_WORKER = t.workers.insert()
_UPDATE_WORKER = t.workers.update().where(t.workers.c.id == sa.bindparam("_id"))
_ADD_EVENT = t.events.insert().returning(t.events.c.id, sort_by_parameter_order=True)

#: Columns in seconds that are no moments, and the end of a token, which lies in the future.
DURATIONS = {"waiting_s", "running_s", "paused_s", "stalled_s", "gpu_s", "expires_s"}


class Change:
    """One transaction. Nothing of it is seen before it is complete."""

    def __init__(self, connection: sa.Connection, actor: str, now_s: float) -> None:
        self._connection = connection
        self.actor, self.now_s = actor, now_s
        self.events: list[Row] = []
        #: Those of which rows were added, changed or deleted.
        self.tables: set[sa.Table] = set()

    def add_job(self, **values: Any) -> int:
        return self.add_jobs([values])[0]

    def add_jobs(self, rows: Sequence[Row]) -> list[int]:
        """Many at once, all with the same columns. Gives their numbers, in order."""
        return [int(key) for key in self._connection.execute(_ADD_JOBS, list(rows)).scalars()]

    def continue_ids_after(self, job_id: int) -> None:
        """Give no id up to this one to a new job."""
        if self._connection.dialect.name == "sqlite":
            self._connection.execute(sa.text("delete from sqlite_sequence where name = 'jobs'"))
            add = sa.text("insert into sqlite_sequence (name, seq) values ('jobs', :last)")
        else:
            add = sa.text("select setval(pg_get_serial_sequence('jobs', 'id'), :last)")
        self._connection.execute(add, {"last": job_id})

    def leave_out_ids(self, table: sa.Table, count: int) -> None:
        """Give the next `count` ids to no row."""
        values = {"name": table.name, "count": count}
        if self._connection.dialect.name == "sqlite":
            self._connection.execute(
                sa.text(
                    "insert into sqlite_sequence (name, seq) select :name, 0 "
                    "where not exists (select 1 from sqlite_sequence where name = :name)"
                ),
                values,
            )
            move = sa.text("update sqlite_sequence set seq = seq + :count where name = :name")
        else:
            sequence = "pg_get_serial_sequence(:name, 'id')"
            move = sa.text(f"select setval({sequence}, nextval({sequence}) + :count)")
        self._connection.execute(move, values)

    def no_later_than(self, now_s: float) -> None:
        """Set all recorded times that lie in the future to `now_s`. A token lives as long as it was meant to."""
        late = t.tokens.c.created_s > now_s
        sooner = t.tokens.c.expires_s - (t.tokens.c.created_s - now_s)
        self._connection.execute(t.tokens.update().where(late).values(expires_s=sooner))
        for table in t.metadata.sorted_tables:
            self.tables.add(table)
            for column in table.c:
                if column.name.endswith("_s") and column.name not in DURATIONS:
                    clamped = table.update().where(column > now_s).values({column.name: now_s})
                    self._connection.execute(clamped)

    def update_job(self, job_id: int, **values: Any) -> None:
        self._connection.execute(_UPDATE_JOB, {"_id": job_id, **values})

    def update_jobs(self, rows: Sequence[Row]) -> None:
        """Many at once; each row has `id` and the same other keys."""
        if rows:
            changes = [{"_id" if k == "id" else k: v for k, v in row.items()} for row in rows]
            self._connection.execute(_UPDATE_JOB, changes)

    def move_settled(self, jump_s: float) -> None:
        """The clock by which unfinished jobs were accounted for is another one now."""
        moved = t.jobs.update().where(t.jobs.c.state.in_(ACTIVE_STATES))
        self._connection.execute(moved.values(settled_s=t.jobs.c.settled_s + jump_s))

    def add_workers(self, rows: Sequence[Row]) -> None:
        if rows:
            self._connection.execute(_ADD_WORKER, list(rows))

    def update_worker(self, worker: str, **values: Any) -> None:
        self._connection.execute(_UPDATE_WORKER, {"_id": worker, **values})

    def update_workers(self, changes: dict[str, Row]) -> None:
        """Many at once, those with the same columns together."""
        alike: dict[tuple[str, ...], list[Row]] = {}
        for worker, values in changes.items():
            alike.setdefault(tuple(values), []).append({"_id": worker, **values})
        for rows in alike.values():
            self._connection.execute(_UPDATE_WORKER, rows)

    def event(
        self,
        type: str,
        message: str,
        *,
        job: int | None = None,
        user: str | None = None,
        plan: int | None = None,
        actor: str | None = None,
        data: Row | None = None,
    ) -> None:
        self.events.append(
            {
                "at_s": self.now_s,
                "type": type,
                "actor": actor or self.actor,
                "job": job,
                "user": user,
                "plan": plan,
                "message": message,
                "data": data or {},
            }
        )

    def flush_events(self) -> None:
        if self.events:
            ids = self._connection.execute(_ADD_EVENT, self.events).scalars().all()
            for row, event_id in zip(self.events, ids):
                row["id"] = int(event_id)

    def put(self, key: str, value: Any) -> None:
        self._upsert(t.settings, ["key"], {"key": key, "value": value})

    def put_knowledge(self, model: str, speed: Row) -> None:
        self._upsert(t.knowledge, ["model"], {"model": model, "speed": speed, "updated_s": self.now_s})

    def insert(self, table: sa.Table, **values: Any) -> int | None:
        """Add a row that was created now. Gives its number, if the table counts its rows."""
        self.tables.add(table)
        result = self._connection.execute(table.insert().values(**values, created_s=self.now_s))
        return _new_key(result) if "id" in table.c else None

    def update(self, table: sa.Table, key: str | int, **values: Any) -> None:
        """Change the row with this primary key."""
        self.tables.add(table)
        (primary,) = table.primary_key
        self._connection.execute(table.update().where(primary == key).values(**values))

    def delete(self, table: sa.Table, where: sa.ColumnElement[bool]) -> None:
        self.tables.add(table)
        self._connection.execute(table.delete().where(where))

    def add_user(self, name: str, role: str, tickets: float, **more: Any) -> None:
        self.insert(t.users, name=name, role=role, tickets=tickets, **more)

    def update_user(self, name: str, **values: Any) -> None:
        self.update(t.users, name, **values)

    def delete_user(self, name: str) -> None:
        self.delete(t.tokens, t.tokens.c.user == name)
        self.delete(t.webhooks, t.webhooks.c.user == name)
        self.delete(t.users, t.users.c.name == name)

    def add_token(self, user: str, hash: str, label: str, expires_s: float | None) -> int:
        row = {
            "user": user,
            "hash": hash,
            "label": label,
            "created_s": self.now_s,
            "expires_s": expires_s,
        }
        return _new_key(self._connection.execute(t.tokens.insert().values(**row)))

    def update_token(self, token_id: int, **values: Any) -> None:
        self._connection.execute(t.tokens.update().where(t.tokens.c.id == token_id).values(**values))

    def delete_token(self, token_id: int) -> None:
        self._connection.execute(t.tokens.delete().where(t.tokens.c.id == token_id))

    def add_idempotency(self, user: str, key: str, body_hash: str, job: int) -> None:
        row = {"user": user, "key": key, "body_hash": body_hash, "job": job, "created_s": self.now_s}
        self._connection.execute(t.idempotency.insert().values(**row))

    def _upsert(self, table: sa.Table, keys: list[str], row: Row) -> None:
        statement = _upsert_into(table, self._connection.dialect.name, tuple(keys), tuple(row))
        self._connection.execute(statement, row)


@functools.cache
def _upsert_into(table: sa.Table, dialect: str, keys: tuple[str, ...], columns: tuple[str, ...]) -> sa.Insert:
    statement = (sqlite if dialect == "sqlite" else postgresql).insert(table)
    rest = {k: statement.excluded[k] for k in columns if k not in keys}
    upsert: sa.Insert = statement.on_conflict_do_update(index_elements=keys, set_=rest)
    return upsert


def _new_key(result: sa.CursorResult[Any]) -> int:
    key = result.inserted_primary_key
    assert key is not None
    return int(key[0])
