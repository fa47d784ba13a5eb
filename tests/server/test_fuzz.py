"""schemathesis over the whole API: whatever is sent, no server error, and every answer is as described."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
import uvicorn
from hypothesis import HealthCheck, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from shoal.server.api.app import make_app
from shoal.server.control import Control
from shoal.server.http_server import HttpServer
from shoal.server.options import Options, bind

from .fakes import Fleet

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]


class InThread:
    """A real HTTP server in a thread, with workers that are not real: what is submitted is never run."""

    def __init__(self, home: Path) -> None:
        self.home, self.url, self.token = home, "", ""
        self.ready = threading.Event()
        self.thread = threading.Thread(target=lambda: asyncio.run(self._serve()))
        self.thread.start()
        assert self.ready.wait(60)

    async def _serve(self) -> None:
        self.loop = asyncio.get_running_loop()
        control = Control(Options(self.home, policy="max-min"), executor=Fleet(4))
        sock = bind("127.0.0.1", 0, None)
        await control.start(sock)
        self.control = control
        self.url, self.token = control.process.address, control.home.admin_token.read_text().strip()
        server = HttpServer(uvicorn.Config(control.app, log_config=None, lifespan="off"))
        serving = await server.start(sock)
        self.stop = asyncio.Event()
        self.ready.set()
        await self.stop.wait()
        await control.close()
        await server.stop(serving)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.stop.set)
        self.thread.join(30)


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InThread]:
    made = InThread(tmp_path_factory.mktemp("fuzz"))
    yield made
    made.close()


# Streams do not end, and an upload is no JSON: they are tested by themselves. The end of the server would end the test.
schema = schemathesis.openapi.from_dict(make_app().openapi()).exclude(
    path_regex="(stream|shutdown|/{digest})$"
)


@schema.parametrize()
@settings(
    max_examples=8,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
def test_every_answer_is_as_described_and_never_a_server_error(case: Any, fuzzed: InThread) -> None:
    headers = {"Authorization": f"Bearer {fuzzed.token}"}
    case.call_and_validate(base_url=fuzzed.url, headers=headers, checks=CHECKS)


def test_after_all_that_the_server_is_well(fuzzed: InThread) -> None:
    import httpx

    http = httpx.Client(
        base_url=f"{fuzzed.url}/api/v1", headers={"Authorization": f"Bearer {fuzzed.token}"}, timeout=30
    )
    assert http.get("/doctor").json()["healthy"]
    assert http.post("/jobs", json={"command": ["x"]}).status_code == 201
    fuzzed.control.loop.devices.check()
