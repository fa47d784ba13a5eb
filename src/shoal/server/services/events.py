"""Events: what happened, filtered, page by page or from an event onwards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass

from shoal.server.api import models as m
from shoal.server.loop.clock import as_time
from shoal.server.store.change import Row
from shoal.server.store.store import Store

#: Events to read at once for a stream.
CHUNK = 500


@dataclass(frozen=True, slots=True)
class EventFilter:
    """Which events to read; None: all. `user` means events of their jobs and actions; `type` is a prefix."""

    job: int | None = None
    user: str | None = None
    type: str | None = None
    since_s: float | None = None


class Events:
    def __init__(self, store: Store, last_id: Callable[[], int]) -> None:
        """`last_id`: the id of the newest event in the store."""
        self._store, self._last_id = store, last_id

    def page(self, chosen: EventFilter, *, after: int, tail: int | None, limit: int) -> list[m.Event]:
        """Events after this id, oldest first; with `tail` only the newest of them."""
        rows = self._store.events(after_id=after, tail=tail, limit=limit, **asdict(chosen))
        names = self._store.job_names(row["job"] for row in rows if row["job"] is not None)
        return [_event(row, names.get(row["job"])) for row in rows]

    def follow(self, chosen: EventFilter, after: int | None, tail: int | None) -> EventReader:
        """Read from this id on. Without an id: the last `tail`, or all since `since_s`, then new ones."""
        if after is not None:
            return EventReader(self, chosen, after, [])
        first = self.page(chosen, after=0, tail=tail, limit=1000) if tail else []
        from_start = chosen.since_s is not None and tail is None
        return EventReader(self, chosen, 0 if from_start else self.last_id, first)

    @property
    def last_id(self) -> int:
        return self._last_id()


class EventReader:
    """The events that one stream has yet to send."""

    def __init__(self, events: Events, chosen: EventFilter, after: int, first: list[m.Event]) -> None:
        self._events, self._chosen, self._after, self._first = events, chosen, after, first

    def read(self) -> list[m.Event]:
        """The next events; empty if there are none yet."""
        last_id = self._events.last_id
        found = self._first or self._events.page(self._chosen, after=self._after, tail=None, limit=CHUNK)
        self._first = []
        # Events that the filter leaves out are passed over, so that they are not read again.
        self._after = max(self._after, found[-1].id if found else last_id)
        return found


def _event(row: Row, job_name: str | None) -> m.Event:
    return m.Event(
        id=row["id"],
        at=as_time(row["at_s"]),
        type=row["type"],
        actor=row["actor"],
        job=row["job"],
        job_name=job_name,
        user=row["user"],
        plan=row["plan"],
        cause=_cause(row),
        message=row["message"],
        data=row["data"],
    )


def _cause(row: Row) -> int | None:
    """The id of the event that led to this one: a decision names the recorded events that it was made on."""
    named = [cause["event"] for cause in (row["data"] or {}).get("causes", []) if "event" in cause]
    return named[0] if named else None
