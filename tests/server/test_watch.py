"""Streams: events and lines as they come, resumed where they broke off, nothing missed and nothing twice."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from shoal.server.api.routes import watch

from .fakes import Here, run, server


@contextlib.asynccontextmanager
async def connect(here: Here, path: str, **headers: str) -> AsyncIterator[Client]:
    """A client on a stream of the real application; it leaves at the end of the block."""
    client = Client()
    path, _, query = path.partition("?")
    head = {"authorization": f"Bearer {here.tokens['admin']}", **headers}
    scope = {
        "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1", "method": "GET",
        "scheme": "http", "path": f"/api/v1{path}", "raw_path": f"/api/v1{path}".encode(), "root_path": "",
        "query_string": query.encode(), "client": ("203.0.113.9", 1), "server": ("test", 80),
        "headers": [(name.replace("_", "-").encode(), value.encode()) for name, value in head.items()],
    }  # fmt: skip
    serving = asyncio.create_task(here.control.app(scope, client.receive, client.send))
    try:
        yield client
    finally:
        client.left.set()
        await asyncio.wait_for(serving, 10)


class Client:
    """The other end of one request."""

    def __init__(self) -> None:
        self.left = asyncio.Event()
        self.status = 0
        self._asked = False
        self._parts: asyncio.Queue[str | None] = asyncio.Queue()

    async def receive(self) -> dict[str, Any]:
        if not self._asked:
            self._asked = True
            return {"type": "http.request", "body": b"", "more_body": False}
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        else:
            self._parts.put_nowait(message["body"].decode())
            if not message.get("more_body"):
                self._parts.put_nowait(None)

    async def part(self) -> str | None:
        """What the server sends next; None at the end of the stream."""
        return await asyncio.wait_for(self._parts.get(), 10)

    async def messages(self, count: int = 1000) -> list[dict[str, str]]:
        """The next messages, at most `count` and up to the end of the stream."""
        found: list[dict[str, str]] = []
        while len(found) < count and (part := await self.part()) is not None:
            fields = [line.partition(": ") for line in part.splitlines() if line and not line.startswith(":")]
            found += [{name: value for name, _, value in fields}] if fields else []
        return found


async def events(here: Here, count: int, query: str = "", **headers: str) -> list[int]:
    async with connect(here, f"/events/stream?{query}", **headers) as client:
        messages = await client.messages(count)
    assert all(json.loads(m["data"])["id"] == int(m["id"]) for m in messages)
    return [int(m["id"]) for m in messages]


def test_events_are_taken_up_after_the_last_one_seen(tmp_path: Path) -> None:
    async def story() -> None:
        async with server(tmp_path, 2) as here:
            job = (await here.submit("1"))["id"]
            await here.until(lambda: here.state(job) == "running")
            page = (await here.get("/events", params={"limit": 1000}))["items"]
            every = [e["id"] for e in page]
            assert await events(here, 2, "cursor=0") == every[:2]
            assert await events(here, len(every) - 2, last_event_id=str(every[1])) == every[2:]
            mine = [e["id"] for e in page if e["job"] == job]
            assert await events(here, 3, f"job={job}&tail=3") == mine[-3:]
            async with connect(here, f"/events/stream?cursor={every[-1]}") as client:
                assert await client.part() == ": shoal\n\n"
                waiting = asyncio.create_task(client.messages(1))
                await asyncio.sleep(0.02)
                assert not waiting.done(), "there is nothing to send yet"
                here.fleet.end(f"{job}.0")
                assert int((await waiting)[0]["id"]) > every[-1]

    run(story())


def test_a_log_is_followed_to_its_end_over_a_restart_of_the_job(tmp_path: Path) -> None:
    async def story() -> None:
        async with server(tmp_path, 1) as here:
            job = (await here.submit("1", max_restarts=1))["id"]
            await here.until(lambda: f"{job}.0" in here.fleet.running)
            async with connect(here, f"/jobs/{job}/logs/stream") as client:
                for attempt in range(2):
                    await here.until(lambda n=attempt: f"{job}.{n}" in here.fleet.running)  # type: ignore[misc]
                    directory = here.loop.worker_directory(job, f"{job}.{attempt}")
                    directory.mkdir(parents=True)
                    (directory / "log.0").write_text(f"2026-01-01T00:00:0{attempt}.000000Z try {attempt}\n")
                    here.fleet.end(f"{job}.{attempt}", 1)
                messages = await client.messages()
            assert [m["event"] for m in messages] == ["line", "line", "end"]
            assert [json.loads(m["data"])["text"] for m in messages[:2]] == ["try 0", "try 1"]
            assert json.loads(messages[2]["data"])["state"] == "failed"
            async with connect(here, f"/jobs/{job}/logs/stream", last_event_id=messages[0]["id"]) as client:
                rest = await client.messages()
            assert [m["event"] for m in rest] == ["line", "end"]
            assert json.loads(rest[0]["data"])["text"] == "try 1"

    run(story())


def test_a_silent_stream_is_kept_alive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        monkeypatch.setattr(watch, "HEARTBEAT_S", 0.02)
        async with server(tmp_path, 1) as here, connect(here, "/events/stream") as client:
            assert await client.part() == ": shoal\n\n"
            for _ in range(3):
                assert await client.part() == ": ping\n\n"

    run(story())


def test_the_number_of_streams_is_limited_and_a_client_that_leaves_makes_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        monkeypatch.setattr("shoal.server.api.hub.MOST_STREAMS_OF_USER", 1)
        async with server(tmp_path, 1) as here:
            async with connect(here, "/events/stream") as client:
                await client.part()
                async with connect(here, "/events/stream") as another:
                    assert "too many streams" in str(await another.part())
                    assert another.status == 429
            async with connect(here, "/events/stream") as client:
                assert await client.part() == ": shoal\n\n"

    run(story())


def test_a_stream_that_cannot_be_is_refused_before_it_begins(tmp_path: Path) -> None:
    async def story() -> None:
        async with server(tmp_path, 1) as here:
            for path, status in (
                ("/events/stream?job=nosuch", 404),
                ("/events/stream?cursor=x", 422),
                ("/jobs/nosuch/logs/stream", 404),
            ):
                async with connect(here, path) as client:
                    assert "error" in json.loads(str(await client.part()))
                    assert client.status == status

    run(story())


def test_streams_end_when_the_server_does(tmp_path: Path) -> None:
    async def story() -> None:
        async with server(tmp_path, 1) as here, connect(here, "/events/stream") as client:
            assert await client.part() == ": shoal\n\n"
            here.control.hub.close()
            assert await client.messages() == []

    run(story())
