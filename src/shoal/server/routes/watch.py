"""Events and logs: pages of them, and streams that go on where they were cut off."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from datetime import datetime
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query
from fastapi.responses import StreamingResponse

from shoal.server import models as m
from shoal.server.auth import Who
from shoal.server.clock import as_time
from shoal.server.errors import Busy
from shoal.server.joblogs import JobLogs
from shoal.server.routes.common import ERRORS, Cursor, JobId, Limit, S, Server, W, find_row, number, seconds

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
    s: Server, who: Who, job: str | None, type: str | None, since: datetime | None
) -> dict[str, Any]:
    job_id = find_row(s, who, job)["id"] if job else None
    return {"job": job_id, "type": type or None, "since_s": seconds(since), "user": who.only}


JobQuery = Annotated[str | None, Query(max_length=100, description="Number or name of a job.")]
TypeQuery = Annotated[str | None, Query(max_length=32, description="A prefix: `job.`, `worker.lost`.")]
Tail = Annotated[int | None, Query(ge=0, le=1000, description="Only the last so many.")]


@router.get("/events", response_model=m.EventList)
async def list_events(
    s: S,
    who: W,
    job: JobQuery = None,
    type: TypeQuery = None,
    since: datetime | None = None,
    tail: Tail = None,
    cursor: Cursor = None,
    limit: Limit = 100,
) -> m.EventList:
    """What happened, oldest first; `next` is where to go on, now or later."""
    after = number(cursor) or 0
    rows = s.store.events(after_id=after, tail=tail, limit=limit, **_filters(s, who, job, type, since))
    last = rows[-1]["id"] if rows else max(after, 0)
    return m.EventList(items=[_event(row) for row in rows], next=str(last))


def sse(event: str, id: str | int, body: str) -> bytes:
    return f"id: {id}\nevent: {event}\ndata: {body}\n\n".encode()


def _stream(s: Server, who: Who, parts: Callable[[], AsyncIterator[bytes]]) -> StreamingResponse:
    if not s.hub.enter(who.user):
        raise Busy("too many streams are open", "close some")

    async def guarded() -> AsyncIterator[bytes]:
        try:
            async for part in parts():
                yield part
        finally:
            s.hub.leave(who.user)

    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return StreamingResponse(guarded(), media_type="text/event-stream", headers=headers)


@router.get("/events/stream", responses=STREAM, response_class=StreamingResponse)
async def stream_events(
    s: S,
    who: W,
    job: JobQuery = None,
    type: TypeQuery = None,
    since: datetime | None = None,
    tail: Tail = None,
    cursor: Cursor = None,
    last_event_id: LastId = None,
) -> StreamingResponse:
    """Events as they happen. Without a cursor: from now on, after the last `tail`."""
    filters = _filters(s, who, job, type, since)
    after = number(last_event_id, "Last-Event-ID") if last_event_id else number(cursor)

    async def parts() -> AsyncIterator[bytes]:
        nonlocal after
        first: list[dict[str, Any]] = []
        if after is None:
            after = s.store.last_event()[0] if since is None or tail is not None else 0
            if tail:
                first = s.store.events(after_id=0, tail=tail, limit=1000, **filters)
        yield b": shoal\n\n"
        while not s.hub.closed:
            for row in first or s.store.events(after_id=after, limit=500, **filters):
                after = max(after, row["id"])
                yield sse(row["type"], row["id"], _event(row).model_dump_json())
                first = []
            if s.hub.last_id <= after or not s.store.events(after_id=after, limit=1, **filters):
                after = max(after, s.hub.last_id)
                if not await s.hub.wait(BEAT_S):
                    yield b": beat\n\n"

    return _stream(s, who, parts)


WorkerQuery = Annotated[str | None, Query(max_length=80, description="One worker only.")]
RankQuery = Annotated[int | None, Query(ge=0, le=1_000_000, description="Workers of this rank only.")]
LogTail = Annotated[
    int | None, Query(ge=0, le=100_000, description="Only the last so many lines of each worker.")
]


@router.get("/jobs/{job}/logs", response_model=m.LogPage)
async def logs(
    job: JobId,
    s: S,
    who: W,
    worker: WorkerQuery = None,
    rank: RankQuery = None,
    since: datetime | None = None,
    tail: LogTail = None,
    cursor: Cursor = None,
    limit: Limit = 1000,
) -> m.LogPage:
    """What its workers printed, merged by time."""
    reader = JobLogs(s, find_row(s, who, job)["id"], worker, rank, seconds(since))
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
    since: datetime | None = None,
    tail: LogTail = None,
    cursor: Cursor = None,
    last_event_id: LastId = None,
) -> StreamingResponse:
    """What its workers print, over resizes and restarts, until the job is over and all is told."""
    job_id = find_row(s, who, job)["id"]
    reader = JobLogs(s, job_id, worker, rank, seconds(since))
    reader.begin(last_event_id or cursor, tail)

    async def parts() -> AsyncIterator[bytes]:
        yield b": shoal\n\n"
        quiet_s = 0.0
        while not s.hub.closed:
            is_over = job_id not in s.conductor.jobs
            reader.look_for_workers()
            lines = await asyncio.to_thread(reader.read, 500)
            for line in lines:
                yield sse("line", line.cursor or "", line.model_dump_json())
            if lines:
                quiet_s = 0.0
                continue
            if is_over:
                row = s.store.job(job_id)
                assert row is not None
                yield sse("end", reader.cursor, s.answers.job(row, workers=True).model_dump_json())
                return
            await s.hub.wait(LOG_POLL_S)
            quiet_s += LOG_POLL_S
            if quiet_s >= BEAT_S:
                quiet_s = 0.0
                yield b": beat\n\n"

    return _stream(s, who, parts)


def dumps(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))
