"""The state port between machines: what an observer of the network sees, and what one who changes bytes can do."""

from __future__ import annotations

import os
import pickle
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist
from elastic_lab import until

import torch
from shoal.agents.certificate import new_certificate
from shoal.torch.group import listening_store
from shoal.torch.packing import as_bytes
from shoal.torch.receiver import Receiver
from shoal.torch.state import ModelState, StateBox
from shoal.torch.stream import Stream, Streams
from shoal.torch.transfer import Link, Window
from shoal.wire.auth import MAC_BYTES, JobKey, read_key, write_secret
from shoal.wire.channel import parse_address
from shoal.wire.messages import Kind, Plan
from torch import nn

SECRET = bytes(range(32))
MARK = b"a value in job.state that nobody else may see"


class Relay:
    """A machine on the path: it passes bytes on, keeps a copy, and may change them."""

    def __init__(self, host: str, target: str) -> None:
        self._target = parse_address(target)
        self._server = socket.create_server((host, 0))
        self.address = f"{host}:{self._server.getsockname()[1]}"
        self.seen = bytearray()
        self.change = lambda data: data
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                left, _ = self._server.accept()
            except OSError:
                return
            right = socket.create_connection(self._target)
            for a, b, change in ((left, right, True), (right, left, False)):
                threading.Thread(target=self._pass_on, args=(a, b, change), daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket, change: bool) -> None:
        try:
            while data := source.recv(1 << 16):
                self.seen += data
                target.sendall(self.change(data) if change else data)
            target.shutdown(socket.SHUT_WR)
        except OSError:
            target.close()

    def close(self) -> None:
        self._server.close()


def model_state(seed: int) -> ModelState:
    torch.manual_seed(seed)
    model = nn.Linear(64, 256)
    return ModelState([model], [torch.optim.SGD(model.parameters(), lr=0.1)], StateBox(mark=MARK))


def certificate() -> bytes:
    return b"".join(new_certificate("a job"))


PEM = certificate()


def streams(host: str, pem: bytes = PEM, bind: str = "") -> Streams:
    return Streams.of("job", host, JobKey(SECRET, pem), bind)


@pytest.fixture
def port() -> Iterator[Receiver]:
    receiver = Receiver(streams("127.0.0.3"), threading.Condition(threading.RLock()))
    yield receiver
    receiver.close()


def plan(address: str) -> Plan:
    return Plan(2, Kind.SWITCH, ("w0", "w1"), 1, ("w0",), {"w1": address})


def send_everything(port: Receiver, address: str, host: str) -> tuple[ModelState, ModelState]:
    """Send the whole state of w0, which is at `host`, to w1. Returns both states."""
    holder, newcomer = model_state(1), model_state(2)
    port.expect(plan(address), "w1")
    link = Link.open(plan(address), "w1", "w0", streams(host), None)
    link.load(plan(address), "w0", holder)
    link.open_window(Window(7, True, {"description": holder.describe({})}))
    link.end_with(7, {})
    incoming = port.get(2)
    assert incoming is not None
    port.open_gate(incoming, newcomer, 7, [])
    with port.changed:
        assert port.changed.wait_for(lambda: incoming.has_ended(7) or incoming.broken, 30)
    assert incoming.broken is None
    newcomer.install(incoming.take(7))
    description = incoming.description(7)
    assert description is not None
    newcomer.adopt(pickle.loads(description))
    link.close()
    return holder, newcomer


@pytest.mark.parametrize(("host", "hidden"), [("127.0.0.2", True), ("127.0.0.3", False)])
def test_between_two_addresses_nothing_of_the_state_is_readable(port: Receiver, host: str, hidden: bool):
    relay = Relay("127.0.0.3", port.address)
    holder, newcomer = send_everything(port, relay.address, host)
    relay.close()
    assert holder.digest() == newcomer.digest()
    weights = bytes(as_bytes(holder.parameters[0]))
    # On one address the bytes do not leave the machine. That case shows that the search finds what is there.
    for secret in (MARK, weights[:256], weights[-256:]):
        assert (secret in relay.seen) is not hidden
    for never in (SECRET, SECRET.hex().encode(), PEM.split(b"PRIVATE KEY-----\n")[1][:40]):
        assert never not in relay.seen


def test_without_a_certificate_no_state_goes_to_another_address(port: Receiver):
    with pytest.raises(Exception, match="not sent over a network in plain text"):
        Link.open(plan(port.address), "w1", "w0", streams("127.0.0.2", pem=b""), None)


def test_a_machine_on_the_path_with_a_certificate_of_its_own_learns_nothing(port: Receiver):
    impostor = Receiver(streams("127.0.0.4", certificate()), threading.Condition())
    with pytest.raises(OSError, match="certificate verify failed"):
        Link.open(plan(impostor.address), "w1", "w0", streams("127.0.0.2"), None)
    impostor.close()


class Bomb:
    def __reduce__(self):
        return os.mkdir, (str(Bomb.path),)

    path: Path


def test_a_head_that_was_changed_on_the_way_is_not_unpickled(tmp_path: Path):
    Bomb.path = tmp_path / "unpickled"
    ends = socket.socketpair()
    sender, receiver = Stream(ends[0], b"a", b"b"), Stream(ends[1], b"b", b"a")
    sender.send_head({"window": 1})
    assert receiver.receive_head() == {"window": 1}
    body = pickle.dumps(Bomb())
    ends[0].sendall(len(body).to_bytes(8, "big") + bytes(MAC_BYTES) + body)
    with pytest.raises(Exception, match="altered, repeated or left out"):
        receiver.receive_head()
    assert not Bomb.path.exists()


def test_a_head_that_is_repeated_is_refused():
    ends = socket.socketpair()
    sender, receiver = Stream(ends[0], b"a", b"b"), Stream(ends[1], b"b", b"a")
    sender.send_head({"window": 1})
    first = ends[1].recv(1 << 16)
    ends[0].sendall(first + first)
    assert receiver.receive_head() == {"window": 1}
    with pytest.raises(Exception, match="altered, repeated or left out"):
        receiver.receive_head()


def test_a_changed_byte_breaks_the_transfer_and_is_no_fault_of_the_newcomer(port: Receiver):
    relay = Relay("127.0.0.3", port.address)
    link = Link.open(plan(relay.address), "w1", "w0", streams("127.0.0.2"), None)
    until(lambda: 2 in port._early)  # the opening has arrived as it was sent
    port.expect(plan(relay.address), "w1")
    relay.change = lambda data: data[:-1] + bytes([data[-1] ^ 1])
    link.load(plan(relay.address), "w0", model_state(1))
    link.open_window(Window(7, True, {}))
    incoming = port.get(2)
    assert incoming is not None
    port.open_gate(incoming, model_state(2), 7, [])
    with port.changed:
        assert port.changed.wait_for(lambda: incoming.broken, 30)
    assert incoming.failure is None
    link.close()
    relay.close()


def test_the_key_file_carries_the_certificate_beside_the_secret(tmp_path: Path):
    write_secret(tmp_path / "key", SECRET, PEM)
    assert read_key(tmp_path / "key") == JobKey(SECRET, PEM.strip())
    assert "PRIVATE" not in repr(read_key(tmp_path / "key"))


def test_the_store_of_a_gpu_group_listens_on_its_own_address_only():
    store = listening_store("127.0.0.2", 2)
    socket.create_connection(("127.0.0.2", store.port)).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", store.port))


@pytest.mark.parametrize(
    ("bind", "reached_at"), [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "127.0.0.1"), ("0.0.0.0", "127.0.0.9")]
)
def test_a_worker_may_listen_on_another_address_than_others_connect_to(bind: str, reached_at: str):
    not_of_this_machine = "192.0.2.7"
    receiver = Receiver(streams(not_of_this_machine, bind=bind), threading.Condition(threading.RLock()))
    host, _, port = receiver.address.rpartition(":")
    assert host == not_of_this_machine
    # From another machine, whose way here leads to the address that it listens on.
    holder, newcomer = send_everything(receiver, f"{reached_at}:{port}", "127.0.0.2")
    assert holder.digest() == newcomer.digest()
    receiver.close()


def test_workers_of_one_machine_meet_although_it_does_not_have_the_address_that_others_connect_to():
    at = streams("192.0.2.7", bind="127.0.0.4")
    receiver = Receiver(at, threading.Condition(threading.RLock()))
    at.open(receiver.address, 1 << 16).close()
    receiver.close()


def test_gloo_listens_on_the_workers_own_address_only():
    def listening() -> set[str]:
        found = psutil.Process().net_connections("tcp")
        return {f"{c.laddr.ip}:{c.laddr.port}" for c in found if c.status == psutil.CONN_LISTEN}

    before = listening()
    device = dist.ProcessGroupGloo.create_device(hostname="127.0.0.3")
    new = listening() - before
    assert new
    assert all(address.startswith("127.0.0.3:") for address in new)
    del device
