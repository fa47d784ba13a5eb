"""Outsiders cannot get in the way: idle sockets, large bodies, other names, old tokens, floods of log lines.

The server is a process of its own with few files, so that running out of them shows at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import pytest

from shoal.cli.up import _open_log
from shoal.core.errors import ShoalError
from shoal.executors.logs import Line, read_lines
from shoal.server.api.limits import Hosts
from shoal.server.connections import Connections, config_of
from shoal.server.home import Home
from shoal.server.http_server import HttpServer
from shoal.server.log_repetitions import MOST_PER_WINDOW, WINDOW_S, Repetitions
from shoal.server.options import bind
from shoal.server.services.job_logs import READS_OF_USER, LogFilter, Logs

from .fakes import run, server
from .test_crash import RealServer

FILES = 1024


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # The server and this process inherit the limits: room here for more sockets than the server may have files.
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(8192, hard), hard))
    home = tmp_path_factory.mktemp("outsiders") / "home"
    command = [
        *(sys.executable, "-c"),
        "import resource, sys; resource.setrlimit(resource.RLIMIT_NOFILE, (256, int(sys.argv[1])));"
        "from shoal.server.serve import main; sys.exit(main(sys.argv[2:]))",
        *(str(FILES), "--home", str(home), "--gpus", "2", "--policy", "fifo"),
    ]
    made = FewFiles(home, command)
    yield made
    made.process.kill()
    made.process.wait()
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


class FewFiles(RealServer):
    """A server process that may open few files."""

    def __init__(self, home: Path, command: list[str]) -> None:
        self.command = command
        super().__init__(home)

    def up(self) -> None:
        popen = subprocess.Popen
        try:
            subprocess.Popen = lambda _, **options: popen(self.command, **options)  # type: ignore[assignment,misc]
            super().up()
        finally:
            subprocess.Popen = popen  # type: ignore[misc]


def idle_sockets(port: int, count: int, stack: contextlib.ExitStack) -> None:
    for _ in range(count):
        stranger = stack.enter_context(socket.socket())
        stranger.setblocking(False)
        stranger.connect_ex(("127.0.0.1", port))


def test_more_idle_sockets_than_the_server_has_files_do_not_stop_a_job(real: RealServer) -> None:
    log = real.home.parent / "serve.log"
    before = log.stat().st_size
    with contextlib.ExitStack() as stack:
        idle_sockets(real.http.base_url.port or 0, 2 * FILES, stack)
        made = real.http.post("/jobs", json={"command": ["true"], "workdir": "/", "gpus": "1"})
        assert made.status_code == 201, made.text
        job, deadline = made.json()["id"], time.monotonic() + 60
        while real.http.get(f"/jobs/{job}").json()["state"] != "succeeded":
            assert time.monotonic() < deadline
            time.sleep(0.05)
    assert log.stat().st_size - before < 100_000


def test_the_body_of_a_stranger_is_not_read(real: RealServer) -> None:
    """The server answers 401 although the body never comes, and closes the connection."""
    where = ("127.0.0.1", real.http.base_url.port or 0)
    with socket.create_connection(where, timeout=30) as stranger:
        stranger.sendall(b"POST /api/v1/jobs HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\nx")
        answer = b""
        while part := stranger.recv(4096):
            answer += part
    assert answer.startswith(b"HTTP/1.1 401")
    assert b"connection: close" in answer.lower()


def test_the_description_needs_a_token_and_a_foreign_host_name_is_refused(real: RealServer) -> None:
    bare = str(real.http.base_url).removesuffix("/api/v1/")
    assert httpx.get(f"{bare}/api/v1/openapi.json").status_code == 401
    assert real.http.get("/openapi.json").status_code == 200
    for path in ("/metrics", "/healthz"):
        assert httpx.get(bare + path, headers={"Host": "attacker.example"}).status_code == 421
        assert httpx.get(bare + path).status_code == 200
    assert httpx.get(f"{bare}/metrics", headers={"X-Forwarded-For": "10.0.0.1"}).status_code == 401


@pytest.mark.parametrize(
    ("header", "allowed"),
    [
        ("localhost:80", True),
        ("127.0.0.1:1234", True),
        ("[::1]:80", True),
        ("10.1.2.3", True),
        ("GPU.example.org:8", True),
        ("evil.example", False),
        ("127.0.0.1.evil.example", False),
    ],
)
def test_a_host_is_an_address_or_a_name_of_the_server(header: str, allowed: bool) -> None:
    assert Hosts(["gpu.example.org"]).allows(header) is allowed


def test_connections_leave_files_for_the_servers_own_work() -> None:
    assert Connections(1024).most < 1024 / 2
    assert Connections(10**9).most <= 8192


def test_one_user_cannot_take_the_places_of_all_others() -> None:
    connections, closed = Connections(0), []
    most_of_users = connections.most - connections.most // 2

    def connect(user: str) -> None:
        connections.opened("127.0.0.1", lambda: closed.append(user)).proved(user)

    for _ in range(most_of_users):
        connect("ada")
    assert closed == []
    connect("bob")
    assert closed == ["ada"], "bob is not refused"
    for _ in range(100):
        connect("ada")
    assert set(closed) == {"ada"}
    assert len(connections) == most_of_users


@contextlib.asynccontextmanager
async def listening(here: Any, connections: Connections) -> AsyncIterator[tuple[str, int]]:
    """uvicorn, as a server runs it, with the application of `here`. Gives its address."""
    sock = bind("127.0.0.1", 0, None)
    http = HttpServer(config_of(here.control.app, connections))
    serving = await http.start(sock)
    yield sock.getsockname()
    await http.stop(serving)


def test_a_client_behind_a_proxy_is_no_stranger_once_its_token_is_known(tmp_path: Path) -> None:
    """The proxy names the client's address, which is not that of the connection."""

    async def story() -> None:
        connections = Connections(10_000)
        async with server(tmp_path) as here, listening(here, connections) as (host, port):
            headers = {"Authorization": f"Bearer {here.tokens['admin']}", "X-Forwarded-For": "10.1.2.3"}
            async with httpx.AsyncClient(base_url=f"http://{host}:{port}", headers=headers) as client:
                assert (await client.get("/api/v1/status")).status_code == 200
                assert (len(connections.strangers), len(connections.users)) == (0, 1)
            while len(connections):
                await asyncio.sleep(0.01)
            async with httpx.AsyncClient(base_url=f"http://{host}:{port}") as client:
                assert (await client.get("/api/v1/status")).status_code == 401
                assert len(connections.users) == 0

    run(story())


def test_a_stranger_with_ever_other_tokens_is_limited_and_costs_no_query(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it says in its headers. Whoever has a token can go on, also from the same address."""
    monkeypatch.setattr("shoal.server.api.limits.RATE_PER_S", 0.0)
    monkeypatch.setattr("shoal.server.api.limits.BURST", 3.0)

    async def story() -> None:
        async with server(tmp_path) as here, listening(here, Connections(10_000)) as (host, port):
            queries: list[str] = []
            of_hash = here.control.store.token_of_hash
            monkeypatch.setattr(
                here.control.store, "token_of_hash", lambda hash_: queries.append(hash_) or of_hash(hash_)
            )
            answers = []
            async with httpx.AsyncClient(base_url=f"http://{host}:{port}/api/v1") as client:
                for i in range(5):
                    headers = {"Authorization": f"Bearer shoal_{i}", "X-Forwarded-For": f"10.1.2.{i}"}
                    answers.append((await client.get("/status", headers=headers)).status_code)
                assert answers == [401, 401, 401, 429, 429]
                assert queries == []
                headers = {"Authorization": f"Bearer {here.tokens['admin']}"}
                assert (await client.get("/status", headers=headers)).status_code == 200

    run(story())


def test_a_websocket_is_no_way_past_the_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a library for WebSockets happens to be installed."""
    auto = "uvicorn.protocols.websockets.auto.AutoWebSocketsProtocol"
    monkeypatch.setattr(auto, type("Installed", (), {}))
    config = config_of(lambda scope, receive, send: None, Connections(1024))
    config.load()
    assert config.ws_protocol_class is None


@pytest.mark.parametrize(
    ("limit", "sent"),
    [
        ("HEAD_S", ""),
        ("HEAD_S", "GET /healthz HTTP/1.1\r\nHost: local"),
        ("HEAD_S", "GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\nGET /he"),
        (
            "BODY_S",
            "POST /api/v1/jobs HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {token}\r\n"
            'Content-Length: 100\r\n\r\n{{"command"',
        ),
    ],
    ids=["nothing", "half a head", "half of the next head", "half a body"],
)
def test_a_request_that_does_not_go_on_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, sent: str
) -> None:
    for other in ("HEAD_S", "BODY_S"):
        monkeypatch.setattr(f"shoal.server.connections.{other}", 0.05 if other == limit else 3600.0)

    async def story() -> None:
        connections = Connections(1024)
        async with server(tmp_path) as here, listening(here, connections) as (host, port):
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(sent.format(token=here.tokens["admin"]).encode())
            with contextlib.suppress(ConnectionResetError):
                while await reader.read(4096):
                    pass  # the answer to the first of two requests
            while len(connections):
                await asyncio.sleep(0.01)
            writer.close()

    run(story())


def test_a_token_does_not_outlive_its_maker_and_a_viewer_makes_none(tmp_path: Path) -> None:
    async def story() -> None:
        async with server(tmp_path) as here:
            await here.add_user("ada")
            short = await here.post("/tokens", json={"user": "ada", "expires_in_s": 100}, status=201)
            here.tokens["short"] = short["token"]
            child = await here.post("/tokens", json={"label": "child"}, user="short", status=201)
            assert child["expires_at"] <= short["expires_at"]
            await here.add_user("vic", "viewer")
            await here.post("/tokens", json={}, user="vic", status=403)

    run(story())


def test_a_join_token_does_not_outlive_the_token_of_its_maker(real: RealServer) -> None:
    short = real.http.post("/tokens", json={"expires_in_s": 100}).json()
    headers = {"Authorization": f"Bearer {short['token']}"}
    made = real.http.post("/join-tokens", json={"expires_in_s": 3600}, headers=headers).json()
    for token in (short, made):
        token["expires_s"] = datetime.fromisoformat(token["expires_at"]).timestamp()
    assert made["expires_s"] <= short["expires_s"] + 1.0, "their clocks differ by less than that"


@pytest.mark.parametrize("how", ["deleted", "expired"])
@pytest.mark.parametrize("path", ["/events/stream", "/jobs/1/logs/stream"], ids=["events", "logs"])
def test_an_open_stream_ends_with_its_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, path: str
) -> None:
    monkeypatch.setattr("shoal.server.api.routes.watch.CHECK_S", 0.02)

    async def story() -> None:
        async with server(tmp_path) as here:
            job = (await here.submit("1"))["id"]
            await here.until(lambda: here.state(job) == "running")
            short = await here.post("/tokens", json={"expires_in_s": 100}, status=201)
            headers = {"Authorization": f"Bearer {short['token']}"}
            stream = asyncio.create_task(here.http.get(f"/api/v1{path}", headers=headers))
            await here.until(lambda: here.control.hub.streams == 1)
            if how == "deleted":
                await here.call("DELETE", f"/tokens/{short['id']}")
            else:
                gate = here.control.services.gate
                monkeypatch.setattr(gate, "_now_s", lambda: here.loop.now_s() + 101.0)
            assert (await asyncio.wait_for(stream, 60)).status_code == 200
            assert here.control.hub.streams == 0

    run(story())


def test_a_name_with_jobs_on_record_is_given_only_to_the_same_person(tmp_path: Path) -> None:
    async def story() -> None:
        async with server(tmp_path) as here:
            await here.add_user("ada")
            job = (await here.submit("1", user="ada"))["id"]
            await here.until(lambda: here.state(job) == "running")
            here.fleet.end(f"{job}.0")
            await here.until(lambda: here.state(job) == "succeeded")
            await here.call("DELETE", "/users/ada")
            refused = await here.post("/users", json={"name": "ada"}, status=409)
            assert "--same-person" in refused["error"]["hint"]
            await here.post("/users", json={"name": "ada", "same_person": True}, status=201)

    run(story())


def test_a_server_starts_again_after_the_first_admin_was_deleted(tmp_path: Path) -> None:
    async def story() -> None:
        async with server(tmp_path) as here:
            job = (await here.submit("1"))["id"]
            await here.until(lambda: here.state(job) == "running")
            here.fleet.end(f"{job}.0")
            await here.until(lambda: here.state(job) == "succeeded")
            await here.add_user("eve", "admin")
            await here.call("DELETE", "/users/admin", user="eve")
            token = here.tokens["eve"]
        async with server(tmp_path) as here:
            here.tokens["eve"] = token
            here.control.home.admin_token.unlink()
            here.control.make_admin()
            found = (await here.get("/users", user="eve"))["items"]
            assert [user["name"] for user in found] == ["eve"], "nobody made admin again"

    run(story())


def test_a_search_by_time_reads_a_few_lines_of_a_long_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with a cursor at the beginning and pages of one line."""
    read: list[int] = []
    monkeypatch.setattr(
        "shoal.server.services.job_logs.read_lines", lambda *place: read.append(1) or read_lines(*place)
    )

    async def story() -> None:
        async with server(tmp_path) as here:
            job = (await here.submit("1"))["id"]
            await here.until(lambda: here.state(job) == "running")
            directory = here.loop.worker_directory(job, f"{job}.0")
            directory.mkdir(parents=True)
            line = b"2026-01-01T00:00:00.000000Z " + b"x" * 71 + b"\n"
            (directory / "log.0").write_bytes(line * 20_000)
            future = {"since": "2099-01-01T00:00:00Z", "limit": "1"}
            for where in ({}, {"cursor": "0:0"}):
                read.clear()
                found = await here.get(f"/jobs/{job}/logs", params=future | where)
                assert found["items"] == []
                assert len(read) <= 2

    run(story())


def test_logs_that_nobody_waits_for_are_not_read_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A log without an end takes both turns of a user, until its readers leave. Others wait in the queue."""
    over, reads = threading.Event(), []

    def endless(directory: Path, begin: int, *rest: int) -> list[Line]:
        if over.is_set() or f"/jobs/{job}/" not in str(directory):
            return []
        reads.append(directory)
        return [Line(0.0, "before the time that is asked for", begin + 1)]

    monkeypatch.setattr("shoal.server.services.job_logs.read_lines", endless)
    job = 0

    async def story() -> None:
        nonlocal job
        async with server(tmp_path) as here, listening(here, Connections(1024)) as (host, port):
            other = (await here.submit("1"))["id"]
            job = (await here.submit("1"))["id"]
            await here.until(lambda: here.state(job) == here.state(other) == "running")
            head = f"Host: localhost\r\nAuthorization: Bearer {here.tokens['admin']}\r\n\r\n"
            question = f"GET /api/v1/jobs/{job}/logs?since=2020-01-01T00:00:00Z HTTP/1.1\r\n{head}"
            writers = []
            for _ in range(2 * READS_OF_USER):
                _, writer = await asyncio.open_connection(host, port)
                writer.write(question.encode())
                writers.append(writer)
            while not reads:
                await asyncio.sleep(0.01)
            for writer in writers:
                writer.close()
            try:
                found = await asyncio.wait_for(here.get(f"/jobs/{other}/logs"), 30)
            finally:
                over.set()
            assert found["items"] == []

    run(story())


def test_users_who_read_long_logs_do_not_keep_the_server_from_other_work(tmp_path: Path) -> None:
    """More readers than the event loop has threads, with which the server checks frames and compiles policies."""
    over, reading = threading.Event(), threading.Semaphore(0)

    def read() -> None:
        reading.release()
        over.wait(60)

    async def story() -> None:
        logs = Logs(None, lambda job, worker: tmp_path)  # type: ignore[arg-type]
        users = [f"user {i}" for i in range((os.cpu_count() or 1) + 4)]
        reads = [
            asyncio.create_task(logs.read_in_turn(user, logs.of(1, LogFilter()), read))
            for user in users
            for _ in range(READS_OF_USER)
        ]
        try:
            while not reading.acquire(blocking=False):
                await asyncio.sleep(0.01)
            assert await asyncio.wait_for(asyncio.to_thread(lambda: "done"), 20) == "done"
        finally:
            over.set()
        await asyncio.gather(*reads)

    asyncio.run(story())


def test_the_secrets_of_a_job_go_when_it_ends(tmp_path: Path) -> None:
    async def story() -> None:
        async with server(tmp_path) as here:
            job = (await here.submit("1..2", secrets={"KEY": "x"}))["id"]
            directory = here.control.home.job(job)
            await here.until(lambda: here.state(job) == "running")
            assert (directory / "secrets.json").exists()
            assert (directory / "secret").exists()
            await here.post(f"/jobs/{job}/cancel")
            await here.until(lambda: here.state(job) == "cancelled")
            await here.until(lambda: not (directory / "secrets.json").exists())
            assert not (directory / "secret").exists()
            (directory / "secrets.json").write_text("{}")  # as if it had been killed just before
        async with server(tmp_path):
            assert not (directory / "secrets.json").exists()

    run(story())


def test_the_api_answers_while_a_policy_compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def slowly(*parts: object, **options: object) -> Callable[[], object]:
        return lambda: (begun.set(), go_on.wait(60))

    monkeypatch.setattr("shoal.server.loop.control_loop.rehearsal", slowly)

    async def story() -> None:
        async with server(tmp_path) as here:
            setting = asyncio.create_task(here.call("PUT", "/policy", json={"name": "max-min"}))
            assert await asyncio.to_thread(begun.wait, 60)
            assert (await here.get("/status"))["policy"] == "fifo"
            go_on.set()
            await setting
            assert (await here.get("/status"))["policy"] == "max-min"

    run(story())


def test_a_loss_that_is_no_number_is_refused(tmp_path: Path) -> None:
    async def story() -> None:
        async with server(tmp_path) as here:
            body = '{"command": ["true"], "workdir": "/", "gpus": "1..2", "target_loss": NaN}'
            headers = {"Authorization": f"Bearer {here.tokens['admin']}", "Content-Type": "application/json"}
            reply = await here.http.post("/api/v1/jobs", content=body, headers=headers)
            assert reply.status_code == 422, reply.text

    run(story())


def test_a_home_is_closed_to_others_and_must_be_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    home.mkdir(mode=0o755)
    home.chmod(0o755)
    taken = Home(home)
    taken.take()
    assert home.stat().st_mode & 0o777 == 0o700
    taken.release()
    monkeypatch.setattr("os.geteuid", lambda: home.stat().st_uid + 1)
    with pytest.raises(ShoalError, match="belongs to user id"):
        Home(home).take()


def test_a_foreign_home_is_refused_before_anything_is_written_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, other = tmp_path / "home", tmp_path / "other"
    home.mkdir(mode=0o755)
    other.write_text("of another")
    (home / "server.log").symlink_to(other)
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr("os.geteuid", lambda: home.stat().st_uid + 1)
        elsewhere.setattr("shoal.cli.up.LOG_BYTES", 0)  # a long log is renamed
        with pytest.raises(ShoalError, match="belongs to user id"):
            _open_log(home)
    assert (home / "server.log").is_symlink()
    assert home.stat().st_mode & 0o777 == 0o755
    with pytest.raises(ShoalError, match="symbolic links"):  # laid before it was closed to others
        _open_log(home)
    assert [path.name for path in home.iterdir()] == ["server.log"]


def test_repeated_log_lines_are_counted_instead_of_written() -> None:
    now_s = 0.0
    repetitions = Repetitions(clock=lambda: now_s)
    record = lambda line: logging.LogRecord("shoal", logging.ERROR, "file.py", line, "no files", (), None)  # noqa: E731
    passed = [repetitions.filter(record(1)) for _ in range(1000)]
    assert sum(passed) == MOST_PER_WINDOW
    assert repetitions.filter(record(2))
    now_s = WINDOW_S
    later = record(1)
    assert repetitions.filter(later)
    assert f"{1000 - MOST_PER_WINDOW} more" in later.getMessage()


def test_a_database_url_is_not_an_argument_of_the_server(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from click.testing import CliRunner

    from shoal.cli.up import up
    from shoal.server.options import parse

    begun: list[list[str]] = []

    def begin(path: str, command: list[str]) -> None:
        begun.append(command)
        assert parse(command[3:]).database == url, "the server gets it by another way"
        raise SystemExit(0)

    monkeypatch.setattr("os.execv", begin)
    monkeypatch.setenv("SHOAL_DATABASE", "")  # `up` changes it; it is put back after this test
    url = "postgresql://me:word@/db"
    told = CliRunner().invoke(up, ["--home", str(tmp_path), "--foreground", "--database", url])
    assert told.exit_code == 0, told.output
    assert "word" not in " ".join(begun[0])
