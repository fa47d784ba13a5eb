"""Events and logs: pages of them, and streams that go on where they were cut off."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import datetime
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query
from fastapi.responses import StreamingResponse

from shoal.server.api import models as m
from shoal.server.api.auth import Who
from shoal.server.api.errors import Busy, NotFound
from shoal.server.api.routes.common import (
    ERRORS,
    Cursor,
    JobId,
    Limit,
    S,
    Server,
    W,
    find_row,
    number,
    printable,
    seconds,
)
from shoal.server.loop.clock import as_time
from shoal.server.services.joblogs import Chosen, JobLogs

router = APIRouter(tags=["watch"], responses=ERRORS)
BEAT_S = 15.0
LOG_POLL_S = 0.25
LastId = Annotated[str | None, Header(alias="Last-Event-ID", max_length=4000)]
STREAM: dict[int | str, dict[str, Any]] = {
    200: {
        "content": {"text/event-stream": {"schema": {"type": "string"}}},
        "description": "Server-sent events",
    }
}


def _event(row: dict[str, Any]) -> m.Event:
    return m.Event(
        id=row["id"],
        at=as_time(row["at_s"]),
        type=row["type"],
        actor=row["actor"],
        job=row["job"],
        user=row["user"],
        plan=row["plan"],
        message=row["message"],
        data=row["data"],
    )


def _filters(
    s: Server, who: Who, job: str | None, user: str | None, type: str | None, since: datetime | None
) -> dict[str, Any]:
    job_id = find_row(s, who, job)["id"] if job else None
    if user and who.only not in (None, user):
        raise NotFound(f"there is no user {printable(user)!r} that you may see")
    return {
        "job": job_id,
        "type": type or None,
        "since_s": seconds(since),
        "user": who.only or user or None,
    }


JobQuery = Annotated[str | None, Query(max_length=100, description="Number or name of a job.")]
UserQuery = Annotated[
    str | None, Query(max_length=64, pattern=m.NAME, description="Of this user's jobs and doings.")
]
TypeQuery = Annotated[str | None, Query(max_length=32, description="A prefix: `job.`, `worker.lost`.")]
Tail = Annotated[int | None, Query(ge=0, le=1000, description="Only the last so many.")]


@router.get("/events", response_model=m.EventList)
async def list_events(
    s: S,
    who: W,
    job: JobQuery = None,
    user: UserQuery = None,
    type: TypeQuery = None,
    since: datetime | None = None,
    tail: Tail = None,
    cursor: Cursor = None,
    limit: Limit = 100,
) -> m.EventList:
    """What happened, oldest first; `next` is where to go on, now or later."""
    after = number(cursor) or 0
    rows = s.store.events(after_id=after, tail=tail, limit=limit, **_filters(s, who, job, user, type, since))
    last = rows[-1]["id"] if rows else max(after, 0)
    return m.EventList(items=[_event(row) for row in rows], next=str(last))


Messages = tuple[list[bytes], bool]
"""What is to be sent next, and whether that is the end."""


def sse(event: str, id: str | int, body: str) -> bytes:
    return f"id: {id}\nevent: {event}\ndata: {body}\n\n".encode()


def _stream(s: Server, who: Who, more: Callable[[], Awaitable[Messages]], poll_s: float) -> StreamingResponse:
    """Send what there is whenever something happens, and look for more at least every `poll_s`."""
    if not s.hub.enter(who.user):
        raise Busy("too many streams are open", "close some")
    loop = asyncio.get_running_loop()

    async def parts() -> AsyncIterator[bytes]:
        try:
            yield b": shoal\n\n"
            sent_s = loop.time()
            while not s.hub.closed:
                messages, is_end = await more()
                for message in messages:
                    yield message
                if is_end:
                    return
                if messages:
                    sent_s = loop.time()
                elif loop.time() - sent_s >= BEAT_S:
                    yield b": beat\n\n"
                    sent_s = loop.time()
                else:
                    await s.hub.wait(poll_s)
        finally:
            s.hub.leave(who.user)

    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return StreamingResponse(parts(), media_type="text/event-stream", headers=headers)


@router.get("/events/stream", responses=STREAM, response_class=StreamingResponse)
async def stream_events(
    s: S,
    who: W,
    job: JobQuery = None,
    user: UserQuery = None,
    type: TypeQuery = None,
    since: datetime | None = None,
    tail: Tail = None,
    cursor: Cursor = None,
    last_event_id: LastId = None,
) -> StreamingResponse:
    """Events as they happen. Without a cursor: from now on, after the last `tail`."""
    filters = _filters(s, who, job, user, type, since)
    begin = number(last_event_id, "Last-Event-ID") if last_event_id else number(cursor)
    first: list[dict[str, Any]] = []
    if begin is None:
        begin = s.store.last_event()[0] if since is None or tail is not None else 0
        first = s.store.events(after_id=0, tail=tail, limit=1000, **filters) if tail else []
    after = begin

    async def more() -> Messages:
        nonlocal after, first
        rows, first = first or s.store.events(after_id=after, limit=500, **filters), []
        # Those that are not for this one are passed over, so that they are not looked through again.
        after = max([after, *(row["id"] for row in rows)]) if rows else max(after, s.hub.last_id)
        return [sse(row["type"], row["id"], _event(row).model_dump_json()) for row in rows], False

    return _stream(s, who, more, BEAT_S)


WorkerQuery = Annotated[str | None, Query(max_length=80, description="One worker only.")]
RankQuery = Annotated[int | None, Query(ge=0, le=1_000_000, description="Workers of this rank only.")]
LogTail = Annotated[
    int | None, Query(ge=0, le=100_000, description="Only the last so many lines of each worker.")
]


AttemptQuery = Annotated[
    int | None, Query(ge=0, le=1_000_000, description="One attempt only: 0, and 1 after the first restart.")
]


@router.get("/jobs/{job}/logs", response_model=m.LogPage)
async def logs(
    job: JobId,
    s: S,
    who: W,
    worker: WorkerQuery = None,
    rank: RankQuery = None,
    attempt: AttemptQuery = None,
    since: datetime | None = None,
    tail: LogTail = None,
    cursor: Cursor = None,
    limit: Limit = 1000,
) -> m.LogPage:
    """What its workers printed, merged by time."""
    which = Chosen(worker, rank, attempt, seconds(since))
    reader = JobLogs(s, find_row(s, who, job)["id"], which)
    reader.begin(cursor, tail)
    lines = await asyncio.to_thread(reader.read, limit)
    return m.LogPage(items=lines, next=reader.cursor if len(lines) == limit else None)


@router.get("/jobs/{job}/logs/stream", responses=STREAM, response_class=StreamingResponse)
async def follow_logs(
    job: JobId,
    s: S,
    who: W,
    worker: WorkerQuery = None,
    rank: RankQuery = None,
    attempt: AttemptQuery = None,
    since: datetime | None = None,
    tail: LogTail = None,
    cursor: Cursor = None,
    last_event_id: LastId = None,
) -> StreamingResponse:
    """What its workers print, over resizes and restarts, until the job is over and all is told."""
    job_id = find_row(s, who, job)["id"]
    reader = JobLogs(s, job_id, Chosen(worker, rank, attempt, seconds(since)))
    reader.begin(last_event_id or cursor, tail)

    async def more() -> Messages:
        is_over = job_id not in s.conductor.jobs  # asked before reading: what it wrote last is read, too
        reader.look_for_workers()
        lines = await asyncio.to_thread(reader.read, 500)
        messages = [sse("line", line.cursor or "", line.model_dump_json()) for line in lines]
        if messages or not is_over:
            return messages, False
        row = s.store.job(job_id)
        assert row is not None
        return [sse("end", reader.cursor, s.answers.job(row, workers=True).model_dump_json())], True

    return _stream(s, who, more, LOG_POLL_S)
