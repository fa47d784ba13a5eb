"""Events and logs: pages of them, and streams that resume where they were cut off."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import datetime
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Query, Request
from fastapi.responses import StreamingResponse
from fastapi.sse import KEEPALIVE_COMMENT, format_sse_event

from shoal.server.api import models as m
from shoal.server.api.auth import Who
from shoal.server.api.hub import Hub
from shoal.server.api.routes.common import ERRORS, Cursor, JobId, Limit, S, Services, W, number, seconds
from shoal.server.services.errors import Busy, NotFound
from shoal.server.services.events import EventFilter
from shoal.server.services.job_logs import LogFilter
from shoal.server.services.naming import printable

router = APIRouter(tags=["watch"], responses=ERRORS)
#: Longest silence on a stream.
HEARTBEAT_S = 15.0
#: Interval between looks for new lines: nothing wakes a stream when a worker prints.
LOG_POLL_S = 0.25
LastId = Annotated[str | None, Header(alias="Last-Event-ID", max_length=4000)]
STREAM: dict[int | str, dict[str, Any]] = {
    200: {
        "content": {"text/event-stream": {"schema": {"type": "string"}}},
        "description": "Server-sent events",
    }
}

JobQuery = Annotated[str | None, Query(max_length=100, description="Number or name of a job.")]
UserQuery = Annotated[
    str | None, Query(max_length=64, pattern=m.NAME, description="Events of this user's jobs and actions.")
]
TypeQuery = Annotated[str | None, Query(max_length=32, description="A prefix: `job.`, `worker.lost`.")]
Tail = Annotated[int | None, Query(ge=0, le=1000, description="Only the last N.")]


def _filter(
    s: Services, who: Who, job: str | None, user: str | None, type: str | None, since: datetime | None
) -> EventFilter:
    job_id = s.jobs.find(job, who.only)["id"] if job else None
    if user and who.only not in (None, user):
        raise NotFound(f"there is no user {printable(user)!r} that you may see")
    return EventFilter(job_id, who.only or user or None, type or None, seconds(since))


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
    """What happened, oldest first; pass `next` as `cursor` to continue, now or later."""
    after = number(cursor) or 0
    chosen = _filter(s, who, job, user, type, since)
    found = s.events.page(chosen, after=after, tail=tail, limit=limit)
    return m.EventList(items=found, next=str(found[-1].id if found else after))


Messages = tuple[list[bytes], bool]
"""What to send next, and whether the stream ends with it."""


async def _one_stream(s: S, who: W) -> AsyncIterator[None]:
    """Count an open stream of this user until the client leaves or the stream ends."""
    if not s.hub.enter(who.user):
        raise Busy("too many streams are open", "close some")
    try:
        yield
    finally:
        s.hub.leave(who.user)


#: Interval between checks that the token of a stream is still valid.
CHECK_S = 2.0


def _stream(
    hub: Hub, is_allowed: Callable[[], bool], more: Callable[[], Awaitable[Messages]], poll_s: float
) -> StreamingResponse:
    """Send what there is whenever something happens, and look for more at least every `poll_s`.

    The stream ends when its token is deleted or expires.

    This loop is our own: FastAPI's raises when a client leaves while a message is pending, and sse-starlette
    replaces uvicorn's signal handling.
    """
    loop = asyncio.get_running_loop()

    async def parts() -> AsyncIterator[bytes]:
        yield format_sse_event(comment="shoal")  # so that a client sees at once that it is connected
        sent_s = checked_s = loop.time()
        while not hub.closed:
            if loop.time() - checked_s >= CHECK_S:
                if not is_allowed():
                    return
                checked_s = loop.time()
            messages, is_end = await more()
            for message in messages:
                yield message
            if is_end:
                return
            if messages:
                sent_s = loop.time()
            elif loop.time() - sent_s >= HEARTBEAT_S:
                yield KEEPALIVE_COMMENT
                sent_s = loop.time()
            else:
                await hub.wait(min(poll_s, CHECK_S))

    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return StreamingResponse(parts(), media_type="text/event-stream", headers=headers)


def _message(event: str, id: str, body: m.Event | m.LogLine | m.Job) -> bytes:
    return format_sse_event(event=event, id=id, data_str=body.model_dump_json())


@router.get(
    "/events/stream",
    responses=STREAM,
    response_class=StreamingResponse,
    dependencies=[Depends(_one_stream)],
)
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
    """Events as they happen. Without a cursor: the last `tail` events, then new ones."""
    chosen = _filter(s, who, job, user, type, since)
    after = number(last_event_id, "Last-Event-ID") if last_event_id else number(cursor)
    reader = s.events.follow(chosen, after, tail)

    async def more() -> Messages:
        return [_message(event.type, str(event.id), event) for event in reader.read()], False

    return _stream(s.hub, lambda: s.gate.is_valid(who), more, HEARTBEAT_S)


WorkerQuery = Annotated[str | None, Query(max_length=80, description="One worker only.")]
RankQuery = Annotated[int | None, Query(ge=0, le=1_000_000, description="Workers of this rank only.")]
LogTail = Annotated[int | None, Query(ge=0, le=100_000, description="Only the last N lines.")]


AttemptQuery = Annotated[
    int | None, Query(ge=0, le=1_000_000, description="One attempt only: 0, and 1 after the first restart.")
]


@router.get("/jobs/{job}/logs", response_model=m.LogPage)
async def logs(
    request: Request,
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
    """Lines that its workers printed, merged by time."""
    job_id = s.jobs.find(job, who.only)["id"]
    reader = s.logs.of(job_id, LogFilter(worker, rank, attempt, seconds(since)))
    reader.look_for_workers()

    def read() -> list[m.LogLine]:
        reader.begin(cursor, tail)
        return reader.read(limit)

    lines = await s.logs.read_in_turn(who.user, reader, read, request.is_disconnected)
    return m.LogPage(items=lines, next=reader.cursor if len(lines) == limit else None)


@router.get(
    "/jobs/{job}/logs/stream",
    responses=STREAM,
    response_class=StreamingResponse,
    dependencies=[Depends(_one_stream)],
)
async def follow_logs(
    request: Request,
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
    """Lines that its workers print, over resizes and restarts, until the job is over and all are sent."""
    job_id = s.jobs.find(job, who.only)["id"]
    reader = s.logs.of(job_id, LogFilter(worker, rank, attempt, seconds(since)))
    reader.look_for_workers()
    begin = functools.partial(reader.begin, last_event_id or cursor, tail)
    await s.logs.read_in_turn(who.user, reader, begin, request.is_disconnected)

    async def more() -> Messages:
        is_over = s.jobs.live(job_id) is None  # asked before reading, so that its last lines are read
        reader.look_for_workers()
        lines = await s.logs.read_in_turn(who.user, reader, functools.partial(reader.read, 500))
        messages = [_message("line", line.cursor or "", line) for line in lines]
        if messages or not is_over:
            return messages, False
        return [_message("end", reader.cursor, s.jobs.by_id(job_id))], True

    return _stream(s.hub, lambda: s.gate.is_valid(who), more, LOG_POLL_S)
