"""The store: every change and the events that tell of it are one transaction.

All calls are made by one thread, that of the server's loop, and each is short: so there is one writer, and what
a reader sees is what the last transaction left. SQLite runs in WAL mode; PostgreSQL is used by its URL.

    with store.change("ada") as change:
        job_id = change.add_job(...)
        change.event("job.submitted", "submitted", job=job_id, user="ada")
"""

from __future__ import annotations

import json
import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import sqlalchemy as sa

from shoal.core.errors import ShoalError
from shoal.server.store import tables as t
from shoal.server.store.carried_over import refuse_what_cannot_be_carried_over
from shoal.server.store.change import ACTIVE_STATES, Change, Row
from shoal.server.store.migrate import migrate

BUSY_TIMEOUT_S = 10.0
SYSTEM = "system"


# Made once: the values are given when they are executed, so that nothing is compiled again.
_JOB = sa.select(t.jobs).where(t.jobs.c.id == sa.bindparam("_id"))
_USER = sa.select(t.users).where(t.users.c.name == sa.bindparam("_name"))


class StoreFull(ShoalError):
    """There is no room for the change; nothing of it was made."""


class StoreDown(ShoalError):
    """The database cannot be reached."""


class Store:
    """Open with a SQLAlchemy URL; the schema is brought up to date."""

    def __init__(self, url: str, *, where: str | None = None) -> None:
        self.url = sa.engine.make_url(url)
        if self.url.drivername in ("postgres", "postgresql"):
            self.url = self.url.set(drivername="postgresql+psycopg")
        where = where or self.url.render_as_string(hide_password=True)
        self.kind = self.url.get_backend_name()
        if self.kind not in ("sqlite", "postgresql"):
            raise ShoalError(f"{self.kind!r} is not a database that Shoal can use: give sqlite or postgresql")
        try:
            self._engine = _engine(self.url)
            refuse_what_cannot_be_carried_over(self._engine, where)
            self.copy = migrate(self._engine, where)
            self._connection = self._engine.connect()
        except ModuleNotFoundError as error:
            raise ShoalError(f"{where} needs {error.name!r}: pip install 'shoal[postgres]'") from None
        except sa.exc.DBAPIError as error:
            raise _translate(error, where) from None
        self._thread = threading.get_ident()
        self.on_events: Callable[[list[Row]], None] = lambda rows: None
        self._users: dict[str, Row] = {}  # as they are in the table: each submission asks for one
        #: The id of the newest event.
        self.last_event_id = self.last_event()[0]

    def close(self) -> None:
        self._connection.close()
        self._engine.dispose()

    @contextmanager
    def change(self, now_s: float, actor: str = SYSTEM) -> Iterator[Change]:
        """One transaction: complete, or as if it had never been."""
        change = Change(self._connection, actor, now_s)
        self._end_read()
        try:
            with self._connection.begin():
                yield change
                change.flush_events()
        except sa.exc.DBAPIError as error:
            raise _translate(error, str(self.url.database)) from error
        if t.users in change.tables:
            self._users.clear()
        if change.events:
            self.last_event_id = change.events[-1]["id"]
            self.on_events(change.events)

    def _end_read(self) -> None:
        if threading.get_ident() != self._thread:
            raise RuntimeError("the store is used by one thread only, that of the server's loop")
        if self._connection.in_transaction():
            self._connection.rollback()

    def _rows(self, statement: sa.Select[Any], values: Row | None = None) -> list[Row]:
        self._end_read()
        try:
            return [dict(row) for row in self._connection.execute(statement, values).mappings()]
        except sa.exc.DBAPIError as error:
            raise _translate(error, str(self.url.database)) from error
        finally:
            self._end_read()

    def _row(self, statement: sa.Select[Any]) -> Row | None:
        rows = self._rows(statement.limit(1))
        return rows[0] if rows else None

    # What is asked

    def job(self, job_id: int) -> Row | None:
        rows = self._rows(_JOB, {"_id": job_id})
        return rows[0] if rows else None

    def job_named(self, name: str, user: str | None) -> Row | None:
        """The newest of that name, an unfinished one first; of one user or of all.

        A job that nobody named is `train-17` by its program and its number, and `train` will do.
        """
        numbered = sa.literal(f"{name}-") + sa.cast(t.jobs.c.id, sa.String)
        by_number = (t.jobs.c.name == numbered) & t.jobs.c.array.is_(None)
        for named in (t.jobs.c.name == name, by_number):
            query = sa.select(t.jobs).where(named)
            if user is not None:
                query = query.where(t.jobs.c.user == user)
            unfinished = t.jobs.c.state.in_(ACTIVE_STATES)
            row = self._row(query.order_by(sa.desc(unfinished), sa.desc(t.jobs.c.id)))
            if row is not None:
                return row
        return None

    def active_jobs(self) -> list[Row]:
        return self._rows(sa.select(t.jobs).where(t.jobs.c.state.in_(ACTIVE_STATES)).order_by(t.jobs.c.id))

    def jobs(
        self,
        *,
        states: Sequence[str] | None = None,
        user: str | None = None,
        name: str | None = None,
        since_s: float | None = None,
        before_id: int | None = None,
        labels: Mapping[str, str] | None = None,
        array: int | None = None,
        limit: int = 100,
    ) -> list[Row]:
        """Newest first."""
        query = sa.select(t.jobs).order_by(sa.desc(t.jobs.c.id)).limit(limit)
        if states is not None:
            query = query.where(t.jobs.c.state.in_(states))
        if user is not None:
            query = query.where(t.jobs.c.user == user)
        if name is not None:
            query = query.where(t.jobs.c.name == name)
        if since_s is not None:
            query = query.where(t.jobs.c.submitted_s >= since_s)
        if before_id is not None:
            query = query.where(t.jobs.c.id < before_id)
        if array is not None:
            query = query.where(t.jobs.c.array == array)
        for key, value in (labels or {}).items():
            query = query.where(t.jobs.c.spec["labels", key].as_string() == value)
        return self._rows(query)

    def states_of_array(self, array: int) -> dict[int, str]:
        """By job: its state on record."""
        query = sa.select(t.jobs.c.id, t.jobs.c.state).where(t.jobs.c.array == array)
        return {row["id"]: row["state"] for row in self._rows(query)}

    def count_jobs(self, user: str | None = None) -> dict[str, int]:
        query = sa.select(t.jobs.c.state, sa.func.count().label("n")).group_by(t.jobs.c.state)
        if user is not None:
            query = query.where(t.jobs.c.user == user)
        return {row["state"]: row["n"] for row in self._rows(query)}

    def workers_of(self, job_id: int, limit: int = 1000) -> list[Row]:
        """The newest `limit`, oldest first."""
        newest = sa.desc(t.workers.c.started_s)
        query = sa.select(t.workers).where(t.workers.c.job == job_id).order_by(newest).limit(limit)
        return sorted(self._rows(query), key=lambda w: (w["started_s"], w["rank"] or 0, w["id"]))

    def unended_workers(self) -> list[Row]:
        return self._rows(sa.select(t.workers).where(t.workers.c.ended_s.is_(None)).order_by(t.workers.c.id))

    def events(
        self,
        *,
        after_id: int = 0,
        job: int | None = None,
        user: str | None = None,
        type: str | None = None,
        since_s: float | None = None,
        until_s: float | None = None,
        tail: int | None = None,
        limit: int = 100,
    ) -> list[Row]:
        """Oldest first. `user` limits them to those of one user's jobs and doings; `type` is a prefix."""
        e = t.events.c
        query = sa.select(t.events).where(e.id > after_id)
        if job is not None:
            query = query.where(e.job == job)
        if user is not None:
            query = query.where((e.user == user) | (e.user.is_(None) & (e.actor == user)))
        if type is not None:
            query = query.where(e.type.startswith(type, autoescape=True))
        if since_s is not None:
            query = query.where(e.at_s >= since_s)
        if until_s is not None:
            query = query.where(e.at_s <= until_s)
        if tail is not None:
            return self._rows(query.order_by(sa.desc(e.id)).limit(min(tail, limit)))[::-1]
        return self._rows(query.order_by(e.id).limit(limit))

    def next_event(self, user: str, types: Sequence[str], after_id: int) -> Row | None:
        """The first event of these types about this user's jobs after the one with this number."""
        e = t.events.c
        query = sa.select(t.events).where(e.id > after_id, e.user == user, e.type.in_(types))
        return self._row(query.order_by(e.id))

    def events_of_jobs_at(self, at_s: float, types: Sequence[str]) -> list[Row]:
        """What had happened, of these types, to the jobs that were unfinished then; oldest first."""
        j, e = t.jobs.c, t.events.c
        then = (j.submitted_s <= at_s) & (j.finished_s.is_(None) | (j.finished_s > at_s))
        there = sa.select(j.id).where(then)
        query = sa.select(t.events).where(e.job.in_(there), e.type.in_(types), e.at_s <= at_s)
        return self._rows(query.order_by(e.id))

    def events_of_job(self, job: int, types: Sequence[str]) -> list[Row]:
        """All of these types, oldest first."""
        e = t.events.c
        return self._rows(sa.select(t.events).where(e.job == job, e.type.in_(types)).order_by(e.id))

    def job_names(self, ids: Iterable[int]) -> dict[int, str]:
        """The names of these jobs."""
        wanted = sorted(set(ids))
        query = sa.select(t.jobs.c.id, t.jobs.c.name).where(t.jobs.c.id.in_(wanted))
        return {row["id"]: row["name"] for row in self._rows(query)} if wanted else {}

    def last_event(self) -> tuple[int, float]:
        """Number and time of the last event; (0, 0.0) in a new store."""
        row = self._row(sa.select(t.events.c.id, t.events.c.at_s).order_by(sa.desc(t.events.c.id)))
        return (row["id"], row["at_s"]) if row else (0, 0.0)

    def get(self, key: str, default: Any = None) -> Any:
        row = self._row(sa.select(t.settings.c.value).where(t.settings.c.key == key))
        return row["value"] if row else default

    def knowledge(self, model: str) -> Row | None:
        row = self._row(sa.select(t.knowledge.c.speed).where(t.knowledge.c.model == model))
        return row["speed"] if row else None

    def job_ids(self) -> set[int]:
        """The ids of all jobs on record."""
        return {row["id"] for row in self._rows(sa.select(t.jobs.c.id))}

    def last_job(self) -> int:
        """The highest id of a job on record, or 0."""
        row = self._row(sa.select(sa.func.max(t.jobs.c.id).label("last")))
        return int(row["last"] or 0) if row else 0

    def rows_of(self, table: sa.Table, where: sa.ColumnElement[bool] | None = None) -> list[Row]:
        """Rows of a small table, in the order of its primary key."""
        query = sa.select(table).order_by(*table.primary_key)
        return self._rows(query if where is None else query.where(where))

    def groups(self) -> list[Row]:
        return self.rows_of(t.groups)

    def users(self) -> list[Row]:
        return self._rows(sa.select(t.users).order_by(t.users.c.created_s, t.users.c.name))

    def user(self, name: str) -> Row | None:
        if name not in self._users:
            self._users |= {row["name"]: row for row in self._rows(_USER, {"_name": name})}
        return self._users.get(name)

    def has_jobs_of(self, user: str) -> bool:
        return self._row(sa.select(t.jobs.c.id).where(t.jobs.c.user == user).limit(1)) is not None

    def tokens(self, user: str | None = None) -> list[Row]:
        query = sa.select(t.tokens).order_by(t.tokens.c.id)
        return self._rows(query if user is None else query.where(t.tokens.c.user == user))

    def token_of_hash(self, hash: str) -> Row | None:
        """The token with its user's role."""
        query = sa.select(t.tokens, t.users.c.role).join(t.users, t.users.c.name == t.tokens.c.user)
        return self._row(query.where(t.tokens.c.hash == hash))

    def token(self, token_id: int) -> Row | None:
        """The token with its user's role."""
        query = sa.select(t.tokens, t.users.c.role).join(t.users, t.users.c.name == t.tokens.c.user)
        return self._row(query.where(t.tokens.c.id == token_id))

    def idempotent(self, user: str, key: str) -> Row | None:
        i = t.idempotency.c
        return self._row(sa.select(t.idempotency).where(i.user == user, i.key == key))

    def size_bytes(self) -> int:
        if self.kind == "sqlite":
            pages = sa.text("select page_count * page_size as n from pragma_page_count(), pragma_page_size()")
        else:
            pages = sa.text("select pg_database_size(current_database()) as n")
        try:
            return int(self._connection.execute(pages).scalar_one())
        finally:
            self._end_read()


def _from_json(text: str) -> Any:
    """msgspec is several times faster. Only the standard library reads infinity and integers of 128 bits."""
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return json.loads(text)


def _engine(url: sa.URL) -> sa.Engine:
    if url.get_backend_name() == "postgresql":
        return sa.create_engine(url, pool_pre_ping=True, connect_args={"connect_timeout": 10})
    engine = sa.create_engine(
        url,
        json_deserializer=_from_json,
        connect_args={"timeout": BUSY_TIMEOUT_S, "check_same_thread": False},
    )

    @sa.event.listens_for(engine, "connect")
    def prepare(connection: sqlite3.Connection, _: Any) -> None:
        connection.isolation_level = None  # transactions begin where SQLAlchemy says, see below
        for pragma in ("journal_mode=wal", "synchronous=normal", "foreign_keys=on"):
            connection.execute(f"pragma {pragma}")

    @sa.event.listens_for(engine, "begin")
    def begin(connection: sa.Connection) -> None:
        connection.exec_driver_sql("begin")

    return engine


def _translate(error: sa.exc.DBAPIError, where: str) -> ShoalError:
    """A database's complaint as a line that says what to do."""
    cause = error.orig
    text = " ".join(str(cause).split())[:300]
    name = getattr(cause, "sqlite_errorname", "")
    full = ("database or disk is full", "disk I/O error", "No space left on device")
    if name in ("SQLITE_FULL", "SQLITE_IOERR_WRITE") or any(w in text for w in full):
        return StoreFull(f"the disk that holds {where} is full; nothing was changed: free some space")
    if isinstance(error, sa.exc.IntegrityError):
        return ShoalError(f"the store refused a change: {text}")
    return StoreDown(f"the store at {where} cannot be used: {text}")
