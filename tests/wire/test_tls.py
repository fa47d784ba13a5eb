"""The wire inside TLS, with a certificate that the test makes."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shoal.wire.auth import AuthError, new_secret
from shoal.wire.channel import Channel
from shoal.wire.messages import Answer, Ask, Hello, Order, Phase, Status, WireError
from shoal.wire.service import ControlService
from shoal.wire.strangers import MAX_STRANGERS


class NoProcesses:
    def start(self, job: str, worker: str) -> None: ...

    def stop(self, job: str, worker: str, kill: bool) -> None: ...


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A self-signed certificate for 127.0.0.1 and its key."""
    where = tmp_path_factory.mktemp("tls")
    certificate, key = where / "cert.pem", where / "key.pem"
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
    ]
    command += ["-days", "1", "-subj", "/CN=shoal", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*command, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    return certificate, key


class Server:
    def __init__(self, certificate: Path, key: Path) -> None:
        self.secret = new_secret()
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.load_cert_chain(certificate, key)
        self.client = ssl.create_default_context(cafile=str(certificate))
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.address = self.do(self._start())

    async def _start(self) -> str:
        self.service = ControlService(NoProcesses())
        address = await self.service.start(tls=self.context)
        job = self.service.add("job", self.secret, on_request=lambda ask: Answer(True, ask.what))
        job.set_target(["w0"])
        return address

    def do(self, work):
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(10)

    def close(self) -> None:
        self.do(self.service.close())
        self.loop.call_soon_threadsafe(self.loop.stop)


@pytest.fixture
def server(certificate: tuple[Path, Path]) -> Iterator[Server]:
    server = Server(*certificate)
    yield server
    server.close()


def test_a_worker_joins_over_tls(server: Server) -> None:
    channel = Channel.open(server.address, server.secret, "job", "worker", tls=server.client)
    channel.send(Hello("w0", 1))
    assert isinstance(channel.receive(), Order)
    channel.send(Status(seq=1, phase=Phase.READY, signature=("a",), address="x:1"))
    while (order := channel.receive()).plan is None:
        pass
    assert order.plan.members == ("w0",)
    channel.close()


def test_one_thread_receives_while_others_send_over_tls(server: Server) -> None:
    channel = Channel.open(server.address, server.secret, "job", "client", tls=server.client)
    texts = [f"{i}" + "x" * 20_000 * (i % 3) for i in range(200)]
    halves = (texts[::2], texts[1::2])
    senders = [threading.Thread(target=lambda h=half: [channel.send(Ask(t)) for t in h]) for half in halves]
    for sender in senders:
        sender.start()
    answers = [channel.receive().text for _ in texts]
    for sender in senders:
        sender.join(10)
    assert sorted(answers) == sorted(texts)
    channel.close()


def test_the_secret_is_needed_inside_tls_too(server: Server) -> None:
    with pytest.raises(AuthError, match="wrong secret or unknown job"):
        Channel.open(server.address, new_secret(), "job", "worker", tls=server.client)


def test_a_client_does_not_trust_a_certificate_that_it_does_not_know(server: Server) -> None:
    with pytest.raises(ssl.SSLCertVerificationError):
        Channel.open(server.address, server.secret, "job", "worker", tls=ssl.create_default_context())


def test_a_client_without_tls_gets_no_answer(server: Server) -> None:
    with pytest.raises((OSError, WireError)):
        Channel.open(server.address, server.secret, "job", "worker", timeout_s=0.5)


def test_an_idle_connection_counts_before_its_tls_handshake(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None of them begins it, and none ends by itself in time."""
    monkeypatch.setattr("shoal.wire.listener.HANDSHAKE_TIMEOUT_S", 3600.0)
    listener, (host, _, port) = server.service.listener, server.address.rpartition(":")
    with contextlib.ExitStack() as stack:
        connect = lambda: stack.enter_context(socket.create_connection((host, int(port)), 30))  # noqa: E731
        idle = [connect() for _ in range(MAX_STRANGERS + 10)]
        for one in idle[:10]:
            assert one.recv(1) == b"", "it had to make room"
        server.do(until(lambda: len(listener.connections) == len(listener.strangers) == MAX_STRANGERS))
        channel = Channel.open(server.address, server.secret, "job", "worker", tls=server.client)
        server.do(until(lambda: len(listener.connections) == len(listener.strangers) + 1 == MAX_STRANGERS))
        channel.close()


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)
