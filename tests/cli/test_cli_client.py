"""The client against a scripted server: streams that break, answers that say no, nobody there."""

import json
import os
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from urllib.parse import parse_qs, urlsplit

import pytest

import shoal
from shoal.client import Client
from shoal.client.errors import (
    BadAnswer,
    ClientError,
    Conflict,
    NotAllowed,
    NotFound,
    NotRunning,
    Rejected,
    TimedOut,
    Unreachable,
    WrongInput,
)
from shoal.server.api.models import Array
from shoal.server.home import start_time


class Scripted(ThreadingHTTPServer):
    """Answers with what `script(method, path, query)` returns: a status and a body, or lines to stream."""

    daemon_threads = True

    def handle_error(self, request, client_address):
        """A client that has hung up is no error here."""

    def __init__(self, script):
        self.script = script
        self.asked = []
        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def address(self):
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    def answer(self):
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length) if length else b""
        url = urlsplit(self.path)
        query = {k: v[0] for k, v in parse_qs(url.query).items()}
        path = url.path.removeprefix("/api/v1/")
        self.server.asked.append((self.command, path, query, dict(self.headers), body))
        status, content = self.server.script(self.command, path, query)
        self.send_response(status)
        if isinstance(content, list):
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            for part in content:
                self.wfile.write(part.encode())
                self.wfile.flush()
                time.sleep(0.2 if part.startswith(":") else 0)
            return
        data = json.dumps(content).encode()
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = answer

    def log_message(self, *_):
        pass


@pytest.fixture
def scripted():
    made = []

    def start(script):
        made.append(Scripted(script))
        return made[-1]

    yield start
    for server in made:
        server.shutdown()
        server.server_close()


def line(number, text):
    body = {"at": "2026-01-01T00:00:00Z", "worker": "w0", "rank": 0, "text": text, "cursor": str(number)}
    return f"id: {number}\nevent: line\ndata: {json.dumps(body)}\n\n"


def job(**changes):
    return {
        "id": 7, "name": "a", "user": "ada", "state": "running", "gpus": 1, "target_gpus": 1, "min_gpus": 1,
        "max_gpus": 4, "requested_gpus": 4, "resize": "live", "command": ["x"], "workdir": "/",
        "submitted_at": "2026-01-01T00:00:00Z",
    } | changes  # fmt: skip


def event(number, kind):
    body = {
        "id": number,
        "at": "2026-01-01T00:00:00Z",
        "type": kind,
        "actor": "system",
        "job": 7,
        "message": "m",
    }
    return f"id: {number}\nevent: {kind}\ndata: {json.dumps(body)}\n\n"


STATUS = {
    "version": "0.1.0", "home": "/h", "pid": 1, "address": "http://x", "started_at": "2026-01-01T00:00:00Z",
    "executor": "local", "virtual": True, "policy": "fifo", "nodes": [], "total_gpus": 4, "used_gpus": 0,
    "jobs": {}, "user": "admin", "role": "admin", "last_event": 40,
}  # fmt: skip


def test_a_log_that_breaks_off_is_taken_up_after_the_last_line(scripted):
    parts = [
        [line(1, "one"), line(2, "two")],  # the connection ends here
        [line(3, "three"), ": alive\n\n", f"event: end\ndata: {json.dumps(job(state='succeeded'))}\n\n"],
    ]
    server = scripted(lambda *_: (200, parts.pop(0)))
    with Client(server.address, "t") as client:
        assert [found.text for found in client.follow_logs("a", tail=5)] == ["one", "two", "three"]
    queries = [query for _, _, query, _, _ in server.asked]
    assert queries == [{"tail": "5"}, {"cursor": "2"}]


def test_wait_follows_events_and_asks_for_the_job_only_when_something_happened(scripted):
    states = ["starting", "running", "succeeded"]

    def script(method, path, query):
        if path == "status":
            return 200, STATUS
        if path == "events/stream":
            assert query == {"job": "7", "cursor": "40"}
            return 200, [event(41, "job.running"), ": alive\n\n", event(42, "job.succeeded")]
        return 200, job(state=states.pop(0))

    server = scripted(script)
    with Client(server.address, "t") as client:
        assert client.wait("a").state == "succeeded"
    assert [path for _, path, *_ in server.asked].count("jobs/7") == 2


def test_wait_gives_up_in_time_though_the_server_goes_on_talking(scripted):
    def script(method, path, query):
        if path == "status":
            return 200, STATUS
        return (200, [": alive\n\n"] * 1000) if path == "events/stream" else (200, job())

    server = scripted(script)
    with Client(server.address, "t") as client, pytest.raises(TimedOut, match="a is still running") as caught:
        client.wait("a", timeout_s=0.5)
    assert caught.value.exit_code == 124


@pytest.mark.parametrize(
    ("status", "code", "kind", "exit_code"),
    [
        (401, "unauthorized", NotAllowed, 4),
        (403, "forbidden", NotAllowed, 4),
        (404, "not_found", NotFound, 3),
        (409, "conflict", Conflict, 5),
        (413, "too_large", Rejected, 7),
        (422, "infeasible", Rejected, 7),
        (422, "invalid", WrongInput, 2),
        (507, "disk_full", ClientError, 1),
        (500, "unexpected", ClientError, 1),
    ],
)
def test_what_the_server_refuses_is_an_exception_with_the_exit_code_of_the_command_line(
    scripted, status, code, kind, exit_code
):
    body = {"error": {"code": code, "message": "no", "hint": "do this", "field": "spec.gpus"}}
    server = scripted(lambda *_: (status, body))
    with Client(server.address, "t") as client, pytest.raises(kind, match=r"^no; do this$") as caught:
        client.job("a")
    assert type(caught.value) is kind
    assert (caught.value.exit_code, caught.value.code, caught.value.field) == (exit_code, code, "spec.gpus")


@pytest.mark.parametrize("send", [Client.submit, Client.submit_array, Client.plan], ids=lambda f: f.__name__)
def test_a_job_that_is_not_valid_is_rejected_as_a_job_file_is(scripted, send):
    body = {"error": {"code": "invalid", "message": "deadline: no", "field": "deadline"}}
    server = scripted(lambda *_: (422, body))
    spec = shoal.JobSpec(command=["true"], workdir="/")
    with Client(server.address, "t") as client, pytest.raises(Rejected, match="deadline: no") as caught:
        send(client, spec)
    assert (caught.value.exit_code, caught.value.code, caught.value.field) == (7, "invalid", "deadline")


def test_an_answer_that_is_not_shoals_is_an_error_and_no_traceback(scripted):
    server = scripted(lambda *_: (200, {"hello": "world"}))
    with Client(server.address, "t") as client, pytest.raises(BadAnswer, match="not understood"):
        client.job("a")
    server = scripted(lambda *_: (502, {"hello": "world"}))
    with Client(server.address, "t") as client, pytest.raises(ClientError, match="answered 502"):
        client.job("a")


def test_nobody_there_is_exit_code_6(tmp_path):
    with pytest.raises(NotRunning, match="start one with `shoal up`") as caught:
        Client(home=tmp_path)
    assert caught.value.exit_code == 6
    with socket.socket() as taken:  # bound, so nobody else can listen there
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with Client(address, "t") as client, pytest.raises(Unreachable) as caught:
            client.status()
    assert caught.value.exit_code == 6


def announce(home, server, pid, started):
    body = {"pid": pid, "start_time": started, "address": server.address, "version": shoal.__version__}
    (home / "server.json").write_text(json.dumps(body))


def test_the_token_is_not_sent_to_who_took_the_port_of_a_server_that_has_ended(
    scripted, tmp_path, monkeypatch
):
    """Neither at first, nor by a client that has spoken to the server, nor when its stream goes on."""
    monkeypatch.setattr("shoal.client.connection.RECONNECT_S", 0.0)
    server = scripted(lambda *_: (200, STATUS))
    (tmp_path / "admin.token").write_text("secret\n")
    own = start_time(os.getpid())
    announce(tmp_path, server, os.getpid(), own + 1)  # a process that got the number of the server
    with pytest.raises(NotRunning, match=r"no server runs on .*; start one with `shoal up`"):
        Client(home=tmp_path)
    announce(tmp_path, server, os.getpid(), own)
    with Client(home=tmp_path) as client:
        client.status()
        announce(tmp_path, server, os.getpid(), own + 1)
        with pytest.raises(NotRunning):
            client.status()
        with pytest.raises(NotRunning):
            list(client.watch_events())
        assert not client.healthy()
    assert len(server.asked) == 1


def test_a_stream_waits_for_the_next_server_of_the_home_and_goes_on_at_its_address(
    scripted, tmp_path, monkeypatch
):
    (tmp_path / "admin.token").write_text("secret\n")
    own = start_time(os.getpid())
    taken = scripted(lambda *_: (200, [event(666, "job.failed")]))
    later = scripted(lambda *_: (200, [event(42, "job.succeeded")]))

    def first(*_):
        announce(tmp_path, taken, os.getpid(), own + 1)  # it ends, and another process takes its port
        return 200, [event(41, "job.running")]

    rests = [lambda: None, lambda: announce(tmp_path, later, os.getpid(), own)]
    clock = SimpleNamespace(monotonic=time.monotonic, sleep=lambda _: rests.pop(0)())
    monkeypatch.setattr("shoal.client.connection.time", clock)
    announce(tmp_path, scripted(first), os.getpid(), own)
    with Client(home=tmp_path) as client:
        events = client.watch_events()
        assert [next(events).id, next(events).id] == [41, 42]
    assert (taken.asked, [query for _, _, query, _, _ in later.asked]) == ([], [{"cursor": "41"}])


def test_a_server_that_says_nothing_is_a_time_out(scripted):
    def slow(*_):
        time.sleep(0.5)
        return 200, {}

    server = scripted(slow)
    with Client(server.address, "t", timeout_s=0.1) as client, pytest.raises(TimedOut) as caught:
        client.status()
    assert caught.value.exit_code == 124


def test_lists_are_read_to_the_last_page_and_no_further_than_the_limit(scripted):
    def script(method, path, query):
        start = int(query.get("cursor", 0))
        ids = range(start, min(start + int(query["limit"]), 2500))
        return 200, {"items": [job(id=i) for i in ids], "next": None if ids.stop == 2500 else str(ids.stop)}

    server = scripted(script)
    with Client(server.address, "t") as client:
        assert [found.id for found in client.jobs()] == list(range(2500))
        assert [found.id for found in client.jobs(limit=1200)] == list(range(1200))


def test_a_submission_sends_the_key_and_only_what_was_given(scripted):
    server = scripted(lambda *_: (201, job()))
    with Client(server.address, "secret-token") as client:
        client.submit(shoal.JobSpec(command=["x"], workdir="/tmp", gpus="1..4"), idempotency_key="k1")
    _, path, _, headers, body = server.asked[0]
    assert (path, headers["Idempotency-Key"]) == ("jobs", "k1")
    assert headers["Authorization"] == "Bearer secret-token"
    assert json.loads(body) == {"command": ["x"], "workdir": "/tmp", "gpus": "1..4"}


@pytest.mark.parametrize("name", ["..", "", "a/../../users", "x" * 10_000, "a?b", "a\nb"])
def test_a_name_cannot_leave_its_place_in_the_address(scripted, name):
    server = scripted(lambda method, path, query: (404, {"error": {"code": "not_found", "message": "none"}}))
    with Client(server.address, "t") as client, pytest.raises(NotFound):
        client.job(name)
    assert all(path.startswith("jobs/") and "/" not in path[5:] for _, path, *_ in server.asked)


def test_the_token_of_this_machine_is_not_shown_to_another(tmp_path):
    (tmp_path / "admin.token").write_text("secret\n")
    with pytest.raises(NotAllowed, match="--token-file"):
        Client("http://example.invalid", home=tmp_path)


@pytest.mark.parametrize("content", [b"", b"two words\xff", b"x" * 5000, b"a\nb"])
def test_a_file_that_holds_no_token_is_not_sent(tmp_path, content):
    (tmp_path / "t").write_bytes(content)
    with pytest.raises(NotAllowed):
        Client("127.0.0.1:1", token_file=tmp_path / "t")


def test_importing_shoal_loads_neither_the_client_nor_the_server():
    import subprocess
    import sys

    heavy = ("shoal.", "httpx", "pydantic")
    code = f"import sys, shoal; print([m for m in sys.modules if m.startswith({heavy})])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    assert shoal.Client is Client
    with pytest.raises(AttributeError, match="no attribute 'Klient'"):
        _ = shoal.Klient


class OfArray(Client):
    """A client of a server with an array of 50 jobs, of which the events are read and some may have ended before."""

    def __init__(self, ends):
        self.ends, self.over, self.looks = ends, set(), 0

    def status(self):
        return SimpleNamespace(last_event=7)

    def array(self, array):
        self.looks += 1
        jobs = {"succeeded": len(self.over), "running": 50 - len(self.over)}
        at = "2026-01-01T00:00:00Z"
        return Array(id=1, name="many", user="ada", tasks=50, created_at=at, jobs=jobs, first=11, last=60)

    def watch_events(self, **query):
        for job in self.ends:
            self.over |= {job} & set(range(11, 61))
            yield SimpleNamespace(job=job, type="job.succeeded")
            yield SimpleNamespace(job=job, type="job.noted")


def test_the_jobs_of_an_array_are_looked_at_when_enough_of_them_have_ended():
    client = OfArray(range(1, 70))
    assert client.wait_array("many").unfinished == 0
    assert client.looks == 2
    client = OfArray(range(11, 60))
    with pytest.raises(TimedOut, match="1 job of many is not over after 3 s"):
        client.wait_array("many", timeout_s=3.0)
    assert client.looks == 2


def test_an_array_that_ends_as_the_time_is_up_has_ended():
    client = OfArray([])
    client.watch_events = lambda **query: client.over.update(range(11, 61)) or iter(())
    assert client.wait_array("many", timeout_s=3.0).unfinished == 0
