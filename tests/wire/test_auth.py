"""Strangers at the port: they can neither join, nor read, nor stop anything."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import socket
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.wire import auth
from shoal.wire.auth import AuthError, ClientProof, Request, Seal, new_secret
from shoal.wire.channel import Channel, parse_address
from shoal.wire.events import JobFailed
from shoal.wire.messages import (
    Answer,
    Ask,
    Hello,
    Kind,
    Order,
    Phase,
    Plan,
    Report,
    Status,
    WireError,
    decode,
    encode,
)
from shoal.wire.service import ControlService


class NoProcesses:
    def start(self, job: str, worker: str) -> None: ...

    def stop(self, job: str, worker: str, kill: bool) -> None: ...


class Server:
    """A control service with one job, in a thread."""

    def __init__(self) -> None:
        self.secret = new_secret()
        self.events: list[object] = []
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.address = self.do(self._start())

    async def _start(self) -> str:
        self.service = ControlService(NoProcesses(), on_event=lambda _, e: self.events.append(e))
        address = await self.service.start()
        self.job = self.service.add("job", self.secret, on_request=lambda ask: Answer(True, "done"))
        self.job.set_target(["w0"])
        return address

    def do(self, work):
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(10)

    def close(self) -> None:
        self.do(self.service.close())
        self.loop.call_soon_threadsafe(self.loop.stop)


@pytest.fixture
def server():
    server = Server()
    yield server
    server.close()


def test_a_worker_with_the_secret_is_taken_in_and_gets_its_order(server: Server):
    channel = Channel.open(server.address, server.secret, "job", "worker")
    channel.send(Hello("w0", 1))
    assert isinstance(channel.receive(), Order)
    channel.send(Status(seq=1, phase=Phase.READY, signature=("a",), address="x:1"))
    order = channel.receive()
    while order.plan is None:
        order = channel.receive()
    assert order.plan.members == ("w0",)
    channel.close()


@pytest.mark.parametrize(
    ("job", "purpose", "right"), [("job", "worker", False), ("other", "worker", True), ("job", "state", True)]
)
def test_a_stranger_is_refused_in_the_same_words_whatever_is_wrong(server, job, purpose, right):
    secret = server.secret if right else new_secret()
    with pytest.raises(AuthError, match="wrong secret or unknown job"):
        Channel.open(server.address, secret, job, purpose)
    assert not server.job.state.workers["w0"].connected


def test_another_protocol_version_is_refused_at_both_ends(server: Server):
    hello, nonce = auth.challenge()
    with pytest.raises(AuthError, match="speaks protocol 999"):
        ClientProof.make(b"SHOAL" + (999).to_bytes(2, "big") + nonce, server.secret, "job", "worker")
    body = json.loads(ClientProof.make(hello, server.secret, "job", "worker").request)
    with pytest.raises(AuthError, match="wrong protocol 999"):
        Request.parse(json.dumps({**body, "protocol": 999}).encode())


def test_a_client_is_not_lured_by_a_server_that_does_not_know_the_secret():
    hello, _ = auth.challenge()
    proof = ClientProof.make(hello, new_secret(), "job", "worker")
    with pytest.raises(AuthError, match="does not know the job's secret"):
        proof.check(b"x" * 32)
    with pytest.raises(AuthError, match="does not speak"):
        ClientProof.make(
            b"HTTP/1.1 400 Bad Request".ljust(auth.CHALLENGE_BYTES), new_secret(), "job", "worker"
        )


@pytest.mark.parametrize(
    "prompt",
    [b"", auth.challenge()[0] + (2000).to_bytes(2, "big")],
    ids=["its challenge", "its answer"],
)
def test_a_client_is_not_held_by_a_server_that_answers_byte_by_byte(prompt: bytes):
    """Each byte arrives in time, but not all of them."""
    listening = socket.create_server(("127.0.0.1", 0))

    def trickle() -> None:
        sock, _ = listening.accept()
        with sock, contextlib.suppress(OSError):
            sock.sendall(prompt)
            for _ in range(100):
                sock.sendall(b"S")
                time.sleep(0.02)

    other = threading.Thread(target=trickle)
    other.start()
    host, port = listening.getsockname()
    with pytest.raises(TimeoutError):
        Channel.open(f"{host}:{port}", new_secret(), "job", "worker", timeout_s=0.2)
    other.join()
    listening.close()


@pytest.mark.parametrize(
    "noise", [b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 5000, b"\x00\x02{}", b"\x00\x00"]
)
def test_noise_on_the_port_disturbs_no_one(server: Server, noise: bytes):
    with socket.create_connection(parse_address(server.address)) as sock:
        sock.sendall(noise)
        sock.shutdown(socket.SHUT_WR)
        while sock.recv(4096):
            pass
    channel = Channel.open(server.address, server.secret, "job", "client")
    channel.send(Ask("status"))
    assert channel.receive() == Answer(True, "done")
    channel.close()


def test_a_proof_seen_on_the_way_cannot_be_used_again(server: Server):
    hello, nonce = auth.challenge()
    proof = ClientProof.make(hello, server.secret, "job", "worker")
    Request.parse(proof.request).prove(server.secret, nonce)
    with pytest.raises(AuthError):
        Request.parse(proof.request).prove(server.secret, auth.challenge()[1])


def test_a_client_cannot_pass_for_a_worker_and_a_worker_cannot_give_orders(server: Server):
    for purpose, message in (("client", Hello("w0", 1)), ("worker", Ask("stop"))):
        channel = Channel.open(server.address, server.secret, "job", purpose)
        channel.send(message)
        with pytest.raises((ConnectionError, OSError)):
            channel.receive()
    assert not any(isinstance(e, JobFailed) for e in server.events)


@given(st.binary(max_size=200), st.integers(0, 215), st.integers(1, 255))
def test_an_altered_repeated_or_reordered_frame_is_noticed(body: bytes, at: int, change: int):
    key = b"k" * 32
    out = Seal(key)
    first, second = out.wrap(body), out.wrap(body)
    header = Seal.HEADER_BYTES

    def read(seal: Seal, frame: bytes) -> bytes:
        return seal.unwrap(frame[:header], frame[header:])

    seal = Seal(key)
    assert read(seal, first) == body
    with pytest.raises(AuthError):
        read(seal, first)
    with pytest.raises(AuthError):
        read(Seal(key), second)
    place = 4 + at % (len(first) - 4)
    altered = first[:place] + bytes([first[place] ^ change]) + first[place + 1 :]
    with pytest.raises(AuthError):
        read(Seal(key), altered)


def test_a_secret_that_others_can_read_is_not_used(tmp_path):
    path = tmp_path / "secret"
    auth.write_secret(path, new_secret())
    assert path.stat().st_mode & 0o777 == 0o600
    assert len(auth.read_secret(path)) == 32
    path.chmod(0o644)
    with pytest.raises(AuthError, match="chmod 600"):
        auth.read_secret(path)
    path.chmod(0o600)
    path.write_text("00ff")
    with pytest.raises(AuthError, match="fewer than 16 bytes"):
        auth.read_secret(path)


PLAN = Plan(3, Kind.SWITCH, ("a", "b"), 2, ("a",), {"b": "h:1"})


@pytest.mark.parametrize(
    "message",
    [
        Hello("w", 1),
        Status(seq=1, phase=Phase.HALTED, members=("a",), signature=("x", "y"), board={"k": "v"}),
        Report(values={"loss": 0.5}, notes=("n",), pause_s=0.1),
        Order(seq=2, plan=PLAN, commit=True, board={"k": "v"}),
        Answer(True, data={"x": [1, {"y": None}]}),
    ],
)
def test_messages_come_out_as_they_went_in(message):
    assert decode(encode(message)) == message


def test_a_worker_of_the_released_version_0_1_is_understood():
    status = decode(b'{"type":"Status","seq":4,"phase":"active","generation":2,"members":["a"],"torn":true}')
    assert status == Status(seq=4, phase=Phase.ACTIVE, generation=2, members=("a",), partial=True)


def test_a_logged_value_that_is_not_a_number_arrives():
    report = decode(encode(Report(values={"loss": float("nan"), "norm": float("inf")})))
    assert math.isnan(report.values["loss"])
    assert report.values["norm"] == math.inf


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"\xff", "not JSON"),
        (b"[]", "Expected `object`, got `array`"),
        (b'{"type":"Root"}', "Invalid value 'Root' - at `\\$.type`"),
        (b'{"type":"Hello","worker":"w"}', "missing required field `pid`"),
        (b'{"type":"Hello","worker":"w","pid":1,"sudo":true}', "unknown field `sudo`"),
        (b'{"type":"Hello","worker":7,"pid":1}', "Expected `str`, got `int`"),
        (b'{"type":"Hello","worker":"w","pid":true}', "Expected `int`, got `bool`"),
        (b'{"type":"Status","seq":1,"phase":"flying"}', "Invalid enum value 'flying'"),
        (b'{"type":"Order","seq":1,"plan":{"number":1}}', "missing required field `kind` - at `\\$.plan`"),
        (b'{"type":"Status","seq":1,"phase":"ready","members":"ab"}', "Expected `array`, got `str`"),
        (
            b'{"type":"Status","seq":99999999999999999999,"phase":"ready"}',
            "Expected `int` <= 9223372036854775807",
        ),
        (b"[" * 100_000, "not JSON"),
    ],
)
def test_a_malformed_message_is_refused_with_the_reason(body: bytes, why: str):
    with pytest.raises(WireError, match=why):
        decode(body)


@given(st.binary(max_size=300))
def test_no_bytes_whatever_break_the_decoder(body: bytes):
    with pytest.raises(WireError):
        decode(body)


def test_a_message_over_the_limit_is_neither_sent_nor_read():
    with pytest.raises(WireError, match="over the limit"):
        encode(Status(seq=1, phase=Phase.READY, signature=("x" * 9_000_000,)))
    with pytest.raises(WireError, match="over the limit"):
        Seal.body_bytes((2**31).to_bytes(4, "big") + b"0" * 16)
