"""State from the holders to a newcomer, beside the training.

Each holder opens an authenticated connection to the newcomer while its group forms. At the switch every holder
sends a part of the state's bytes, straight from the live tensors: from one optimizer step to the next they do not
change, so the transfer hides behind forward and backward, and only an optimizer step that comes earlier than the
transfer's end has to wait. The newcomer receives straight into its own parameters.
"""

from __future__ import annotations

import contextlib
import pickle
import socket
import threading
from dataclasses import dataclass, field
from typing import Any

import torch
from shoal.torch.state import Capture, as_bytes
from shoal.wire.channel import accept, connect, receive_exactly, receive_into
from shoal.wire.messages import Plan
from torch import Tensor

PURPOSE = "state"
CHUNK_BYTES = 4 * 1024 * 1024
MAX_SOURCES = 4
MAX_HEAD_BYTES = 1 << 32


def sources_of(plan: Plan, newcomer: str) -> tuple[str, ...]:
    """The holders that send to a newcomer: all, but at most a few, and different ones for different newcomers."""
    holders = plan.holders or plan.members[:1]
    first = plan.members.index(newcomer) * MAX_SOURCES
    count = min(MAX_SOURCES, len(holders))
    return tuple(holders[(first + i) % len(holders)] for i in range(count))


def byte_range(total: int, sources: int, index: int) -> tuple[int, int]:
    return total * index // sources, total * (index + 1) // sources


def pieces(sizes: list[int], begin: int, end: int) -> list[tuple[int, int, int]]:
    """The bytes [begin, end) of tensors laid end to end, as (tensor, from, to), in chunks."""
    result, offset = [], 0
    for index, size in enumerate(sizes):
        low, high = max(begin - offset, 0), min(end - offset, size)
        while low < high:
            stop = min(low + CHUNK_BYTES, high)
            result.append((index, low, stop))
            low = stop
        offset += size
    return result


@dataclass(slots=True)
class Link:
    """A holder's connection to one newcomer for one plan."""

    newcomer: str
    sock: socket.socket
    thread: threading.Thread | None = None
    error: str | None = None

    @staticmethod
    def open(plan: Plan, newcomer: str, me: str, secret: bytes, job: str) -> Link:
        sock, _ = connect(plan.addresses[newcomer], secret, job, PURPOSE)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, CHUNK_BYTES)
        _send_head(sock, {"plan": plan.number, "source": me})
        return Link(newcomer, sock)

    def start(self, plan: Plan, me: str, step: int, random: Any, capture: Capture) -> None:
        self.thread = threading.Thread(
            target=self._send, args=(plan, me, step, random, capture), name="shoal-state", daemon=True
        )
        self.thread.start()

    def _send(self, plan: Plan, me: str, step: int, random: Any, capture: Capture) -> None:
        try:
            sources = sources_of(plan, self.newcomer)
            index = sources.index(me)
            head = {"step": step, "random": random, "rank": plan.holders.index(me) if plan.holders else 0}
            if index == 0:
                head["description"] = capture.description
            _send_head(self.sock, head)
            sizes = [t.numel() * t.element_size() for t in capture.large]
            for tensor, low, high in pieces(sizes, *byte_range(sum(sizes), len(sources), index)):
                self.sock.sendall(as_bytes(capture.large[tensor])[low:high])
        except (OSError, ValueError) as error:
            self.error = str(error)
        finally:
            self.close()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_WR)
        self.sock.close()


@dataclass(slots=True)
class Incoming:
    """What a newcomer is being given for one plan."""

    plan: Plan
    sources: tuple[str, ...]
    heads: dict[str, dict[str, Any]] = field(default_factory=dict)
    finished: set[str] = field(default_factory=set)
    facts: dict[str, Any] | None = None
    homes: list[Tensor] | None = None
    broken: str | None = None


class Receiver:
    """Listens for state. Connections are accepted from those who know the job's secret, for plans known here."""

    def __init__(self, host: str, job: str, secret: bytes, changed: threading.Condition) -> None:
        self._job, self._secret = job, secret
        self._server = socket.create_server((host, 0))
        self.address = f"{host}:{self._server.getsockname()[1]}"
        self.changed = changed
        self._incoming: dict[int, Incoming] = {}
        self._early: dict[int, dict[str, socket.socket]] = {}
        threading.Thread(target=self._listen, name="shoal-receive", daemon=True).start()

    def expect(self, plan: Plan, me: str) -> None:
        with self.changed:
            incoming = self._incoming[plan.number] = Incoming(plan, sources_of(plan, me))
            for source, sock in self._early.pop(plan.number, {}).items():
                self._serve(incoming, source, sock)

    def forget(self, number: int) -> None:
        with self.changed:
            incoming = self._incoming.pop(number, None)
            if incoming is not None:
                incoming.broken = "the plan was dropped"
            for sock in self._early.pop(number, {}).values():
                sock.close()
            self.changed.notify_all()

    def get(self, number: int) -> Incoming | None:
        return self._incoming.get(number)

    def close(self) -> None:
        self._server.close()

    def open_gate(self, incoming: Incoming, facts: dict[str, Any], homes: list[Tensor]) -> None:
        """From now on the tensors may be written to."""
        with self.changed:
            incoming.facts, incoming.homes = facts, homes
            self.changed.notify_all()

    def _listen(self) -> None:
        while True:
            try:
                sock, _ = self._server.accept()
            except OSError:
                return
            threading.Thread(target=self._greet, args=(sock,), name="shoal-greet", daemon=True).start()

    def _greet(self, sock: socket.socket) -> None:
        try:
            accept(
                sock, lambda job, purpose: self._secret if (job, purpose) == (self._job, PURPOSE) else None
            )
            head = _receive_head(sock, 4096)
            number, source = int(head["plan"]), str(head["source"])
        except Exception:
            sock.close()
            return
        with self.changed:
            incoming = self._incoming.get(number)
            if incoming is None:
                self._early.setdefault(number, {})[source] = sock
            else:
                self._serve(incoming, source, sock)

    def _serve(self, incoming: Incoming, source: str, sock: socket.socket) -> None:
        threading.Thread(
            target=self._receive, args=(incoming, source, sock), name="shoal-receive", daemon=True
        ).start()

    def _receive(self, incoming: Incoming, source: str, sock: socket.socket) -> None:
        try:
            head = _receive_head(sock, MAX_HEAD_BYTES)
            with self.changed:
                incoming.heads[source] = head
                self.changed.notify_all()
                self.changed.wait_for(lambda: incoming.homes is not None or incoming.broken)
                if incoming.broken:
                    return
            homes = incoming.homes
            assert homes is not None
            sizes = [t.numel() * t.element_size() for t in homes]
            span = byte_range(sum(sizes), len(incoming.sources), incoming.sources.index(source))
            for tensor, low, high in pieces(sizes, *span):
                _receive_piece(sock, homes[tensor], low, high)
            with self.changed:
                incoming.finished.add(source)
                self.changed.notify_all()
        except Exception as error:
            with self.changed:
                incoming.broken = incoming.broken or f"from {source}: {error}"
                self.changed.notify_all()
        finally:
            sock.close()


def _receive_piece(sock: socket.socket, home: Tensor, low: int, high: int) -> None:
    if home.device.type == "cpu" and home.is_contiguous():
        receive_into(sock, as_bytes(home)[low:high])
        return
    piece = torch.frombuffer(bytearray(receive_exactly(sock, high - low)), dtype=torch.uint8)
    flat = home.contiguous().view(-1).view(torch.uint8)
    flat[low:high] = piece.to(home.device)
    if not home.is_contiguous():
        home.copy_(flat.view(home.dtype).view(home.shape))


def _send_head(sock: socket.socket, head: dict[str, Any]) -> None:
    body = pickle.dumps(head)
    sock.sendall(len(body).to_bytes(8, "big") + body)


def _receive_head(sock: socket.socket, limit: int) -> dict[str, Any]:
    size = int.from_bytes(receive_exactly(sock, 8), "big")
    if size > limit:
        raise ValueError("the description of the state is too long")
    # Only someone who knows the job's secret gets here.
    head = pickle.loads(receive_exactly(sock, size))
    if not isinstance(head, dict):
        raise ValueError("malformed description")
    return head
