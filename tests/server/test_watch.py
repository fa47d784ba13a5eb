"""Streams: events and lines as they come, taken up again where they broke off, nothing missed and nothing twice."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from shoal.server.api.auth import Who
from shoal.server.api.errors import Busy
from shoal.server.api.models import Role
from shoal.server.api.routes import watch
from shoal.sse import read_messages

from .fakes import Here, run, server

ADMIN = Who("admin", Role.ADMIN, 1)


async def read(response: Any, count: int, wait_s: float = 10.0) -> list[Any]:
    """The first `count` messages; then the reader hangs up."""
    found: list[Any] = []
    body: AsyncIterator[bytes] = response.body_iterator
    try:
        async with asyncio.timeout(wait_s):
            async for part in body:
                found += [m for m in read_messages(part.decode().splitlines()) if m is not None]
                if len(found) >= count:
                    return found[:count]
    finally:
        await body.aclose()  # type: ignore[attr-defined]
    return found


async def events(here: Here, count: int, **query: Any) -> list[int]:
    response = await watch.stream_events(here.control.server, ADMIN, **query)
    return [json.loads(m.data)["id"] for m in await read(response, count)]


def test_events_are_taken_up_after_the_last_one_seen(tmp_path: Path) -> None:
    async def story() -> None:
        async with server(tmp_path, 2) as here:
            job = (await here.submit("1"))["id"]
            await here.until(lambda: here.state(job) == "running")
            page = (await here.get("/events", params={"limit": 1000}))["items"]
            every = [e["id"] for e in page]
            assert await events(here, 2, cursor="0") == every[:2]
            assert await events(here, len(every) - 2, last_event_id=str(every[1])) == every[2:]
            mine = [e["id"] for e in page if e["job"] == job]
            assert await events(here, 3, job=str(job), tail=3) == mine[-3:]
            waiting = asyncio.create_task(events(here, 1, cursor=str(every[-1])))
            await asyncio.sleep(0.02)
            assert not waiting.done(), "there is nothing to tell yet"
            here.fleet.end(f"{job}.0")
            assert (await waiting)[0] > every[-1]

    run(story())


def test_a_log_is_followed_to_its_end_over_a_restart_of_the_job(tmp_path: Path) -> None:
    async def story() -> None:
        async with server(tmp_path, 1) as here:
            job = (await here.submit("1", max_restarts=1))["id"]
            await here.until(lambda: f"{job}.0" in here.fleet.running)
            response = await watch.follow_logs(str(job), here.control.server, ADMIN)
            following = asyncio.create_task(read(response, 100))
            for attempt in range(2):
                await here.until(lambda n=attempt: f"{job}.{n}" in here.fleet.running)  # type: ignore[misc]
                directory = here.conductor.worker_directory(job, f"{job}.{attempt}")
                directory.mkdir(parents=True)
                (directory / "log.0").write_text(f"2026-01-01T00:00:0{attempt}.000000Z try {attempt}\n")
                here.fleet.end(f"{job}.{attempt}", 1)
            messages = await following
            assert [m.event for m in messages] == ["line", "line", "end"]
            assert [json.loads(m.data)["text"] for m in messages[:2]] == ["try 0", "try 1"]
            assert json.loads(messages[2].data)["state"] == "failed"
            again = await watch.follow_logs(
                str(job), here.control.server, ADMIN, last_event_id=messages[0].id
            )
            rest = await read(again, 100)
            assert [m.event for m in rest] == ["line", "end"]
            assert json.loads(rest[0].data)["text"] == "try 1"

    run(story())


def test_a_silent_stream_is_kept_alive_and_the_number_of_streams_is_limited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        monkeypatch.setattr(watch, "BEAT_S", 0.02)
        async with server(tmp_path, 1) as here:
            response = await watch.stream_events(here.control.server, ADMIN)
            parts = response.body_iterator
            assert await anext(parts) == b": shoal\n\n"
            assert await anext(parts) == b": beat\n\n"
            monkeypatch.setattr("shoal.server.api.hub.MOST_STREAMS_OF_USER", 1)
            with pytest.raises(Busy):
                await watch.stream_events(here.control.server, ADMIN)
            await parts.aclose()  # type: ignore[attr-defined]
            await watch.stream_events(here.control.server, ADMIN)

    run(story())


def test_streams_end_when_the_server_does(tmp_path: Path) -> None:
    async def story() -> None:
        async with server(tmp_path, 1) as here:
            response = await watch.stream_events(here.control.server, ADMIN)
            reading = asyncio.create_task(read(response, 1))
            await asyncio.sleep(0.02)
            here.control.hub.close()
            assert await reading == []

    run(story())
