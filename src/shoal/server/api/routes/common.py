"""What the routes share: who asks, which job is meant, cursors."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any

from fastapi import Depends, Path, Query, Request

from shoal.core.errors import did_you_mean
from shoal.server.api import models as m
from shoal.server.api.auth import Gate, Who
from shoal.server.api.errors import Invalid, NotFound
from shoal.server.api.hub import Hub
from shoal.server.home import Home
from shoal.server.loop.conductor import Conductor
from shoal.server.loop.live_job import LiveJob
from shoal.server.services.answers import Answers
from shoal.server.services.history import History
from shoal.server.services.verbs import Conflict, Verbs
from shoal.server.store.store import Store

ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": m.Error, "description": text}
    for status, text in (
        (400, "The request cannot be read"),
        (401, "No valid token"),
        (403, "Your role may not do this"),
        (404, "There is none, or you may not see it"),
        (409, "It is not in a state for this"),
        (413, "The body is too large"),
        (422, "The request does not fit the schema, or can never be fulfilled"),
        (429, "Too many requests or streams"),
        (507, "The disk is full; nothing was changed"),
    )
}


@dataclass(slots=True)
class Server:
    """All that a request may need."""

    conductor: Conductor
    store: Store
    verbs: Verbs
    answers: Answers
    history: History
    gate: Gate
    hub: Hub
    home: Home
    started_s: float
    address: str = ""
    pid: int = 0
    shut_down: Any = None


# Asynchronous, though they wait for nothing: FastAPI would call plain functions in other threads.
async def get_server(request: Request) -> Server:
    server: Server = request.app.state.server
    return server


async def get_who(request: Request) -> Who:
    return (await get_server(request)).gate.who(request)


S = Annotated[Server, Depends(get_server)]
W = Annotated[Who, Depends(get_who)]
JobId = Annotated[str, Path(max_length=100, description="Number or name of a job.", examples=["17"])]
Limit = Annotated[int, Query(ge=1, le=1000)]
Cursor = Annotated[str | None, Query(max_length=4000)]


def find_row(s: Server, who: Who, job: str) -> dict[str, Any]:
    """The job that is meant, if this one may see it."""
    row = None
    if job.isascii() and job.isdigit() and len(job) < 18:
        row = s.store.job(int(job))
    elif all(31 < ord(c) != 127 and not 0xD800 <= ord(c) < 0xE000 for c in job):
        row = s.store.job_named(job, who.only)
    if row is None or (who.only is not None and row["user"] != who.only):
        names = {j.name for j in s.conductor.jobs.values() if who.sees_all or j.user == who.user}
        hint = did_you_mean(job, names) if names and len(names) < 1000 else None
        if hint is None or not hint.startswith("did you mean"):
            hint = "`shoal ps -a` lists the jobs you may see"
        raise NotFound(f"there is no job {printable(job)!r}", hint)
    return row


def printable(text: str) -> str:
    return text.encode("utf-8", "replace").decode()


def find_live(s: Server, who: Who, job: str) -> LiveJob:
    """The same, if it is not over."""
    row = find_row(s, who, job)
    live = s.conductor.jobs.get(row["id"])
    if live is None:
        raise Conflict(f"job {row['name']} is over: it {row['state']}")
    return live


def live_to_change(s: Server, who: Who, job: str) -> LiveJob:
    who.must_change()
    live = find_live(s, who, job)
    who.must_change(live.user)
    return live


def number(cursor: str | None, what: str = "cursor") -> int | None:
    """A cursor that is a number."""
    if cursor is None or cursor == "":
        return None
    if not (cursor.isascii() and cursor.isdigit() and len(cursor) < 18):
        raise Invalid(f"{what}: {printable(cursor[:40])!r} is not one that was given out", what)
    return int(cursor)


def seconds(at: datetime | None, what: str = "since") -> float | None:
    """A time as seconds since 1970; without a zone it is UTC."""
    if at is None:
        return None
    from datetime import UTC

    try:
        found = (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()
    except (OverflowError, ValueError):
        raise Invalid(f"{what}: this time is out of range", what) from None
    return found if math.isfinite(found) else 0.0
