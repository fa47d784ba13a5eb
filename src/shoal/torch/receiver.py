"""The newcomer's side of a state transfer: threads that receive pieces into the newcomer's own parameters."""

from __future__ import annotations

import contextlib
import socket
import threading
from dataclasses import dataclass, field
from typing import Any

from shoal.torch.packing import as_bytes
from shoal.torch.state import ModelState, Received
from shoal.torch.stream import Stream, Streams
from shoal.torch.transfer import sources_of
from shoal.wire.messages import Plan, WireError
from shoal.wire.strangers import Strangers
from torch import Tensor

MAX_OPENING_BYTES = 4096
MAX_STRANGERS = 64
"""Connections that have not proved yet that they know the secret. Each has a thread."""


@dataclass(slots=True)
class Incoming:
    """What a newcomer receives for one plan."""

    plan: Plan
    sources: tuple[str, ...]
    state: ModelState | None = None
    flats: list[Tensor] = field(default_factory=list)  # the buckets for the summed gradients
    gate: int = -1  # windows up to this step may be written into the state
    windows: dict[int, dict[str, dict[str, Any]]] = field(default_factory=dict)  # step -> source -> head
    ends: dict[int, dict[str, dict[str, Any]]] = field(default_factory=dict)  # step -> source -> end
    ended: dict[str, int] = field(default_factory=dict)  # source -> the step of its last closed window
    arrived: list[tuple[int, Received]] = field(default_factory=list)  # (step, piece) that are not installed
    have: dict[int, int] = field(default_factory=dict)  # parameter -> number of installed elements
    broken: str | None = None
    failure: Exception | None = None  # an error of this worker, not of its sources or links

    def is_broken(self) -> bool:
        return self.broken is not None

    @property
    def offered(self) -> int | None:
        """The step of the first window, once its description has arrived."""
        found = [
            step for step, heads in self.windows.items() if any("description" in h for h in heads.values())
        ]
        return min(found, default=None)

    def description(self, step: int) -> bytes | None:
        """The latest description of this window."""
        heads = [*self.ends.get(step, {}).values(), *self.windows.get(step, {}).values()]
        return next((h["description"] for h in heads if "description" in h), None)

    def is_final(self, step: int) -> bool:
        return any(h["final"] for h in self.windows.get(step, {}).values())

    def has_ended(self, step: int) -> bool:
        return all(self.ended.get(source, -1) >= step for source in self.sources)

    def take(self, step: int) -> list[Received]:
        """The pieces of windows up to this one, each once."""
        taken = [got for s, got in self.arrived if s <= step]
        self.arrived = [(s, got) for s, got in self.arrived if s > step]
        for piece in (got.piece for got in taken):
            self.have[piece.index] = self.have.get(piece.index, 0) + piece.high - piece.low
        return taken


class Receiver:
    """Listens for state. Accepts connections from peers that know the job's secret."""

    def __init__(self, streams: Streams, changed: threading.Condition) -> None:
        self._streams = streams
        self._server = socket.create_server((streams.own_address, 0))
        self.address = f"{streams.host}:{self._server.getsockname()[1]}"
        self.changed = changed
        self._incoming: dict[int, Incoming] = {}
        self._early: dict[int, dict[str, Stream]] = {}
        self._over = 0  # plans up to this number are dropped or complete
        self._strangers, self._places = Strangers(MAX_STRANGERS), threading.Lock()
        threading.Thread(target=self._listen, name="shoal-receive", daemon=True).start()

    def expect(self, plan: Plan, me: str) -> None:
        with self.changed:
            incoming = self._incoming[plan.number] = Incoming(plan, sources_of(plan, me))
            for source, stream in self._early.pop(plan.number, {}).items():
                self._serve(incoming, source, stream)

    def forget(self, number: int) -> None:
        with self.changed:
            self._over = max(self._over, number)
            incoming = self._incoming.pop(number, None)
            if incoming is not None:
                incoming.broken = "the plan was dropped"
            for early in [n for n in self._early if n <= number]:
                for stream in self._early.pop(early).values():
                    stream.close()
            self.changed.notify_all()

    def finished(self, number: int) -> None:
        """The whole state is installed: forget what was received for it."""
        with self.changed:
            self._over = max(self._over, number)
            self._incoming.pop(number, None)

    def get(self, number: int) -> Incoming | None:
        return self._incoming.get(number)

    def close(self) -> None:
        self._server.close()

    def open_gate(self, incoming: Incoming, state: ModelState, step: int, flats: list[Tensor]) -> None:
        """The state here is that after `step` steps: the pieces of this window may be written into it."""
        with self.changed:
            incoming.state, incoming.flats, incoming.gate = state, flats, step
            self.changed.notify_all()

    def _listen(self) -> None:
        while True:
            try:
                sock, peer = self._server.accept()
            except OSError:
                return
            with self._places:
                place = self._strangers.enter(str(peer[0]), lambda sock=sock: _cut(sock))  # type: ignore[misc]
            threading.Thread(target=self._greet, args=(sock, place), name="shoal-greet", daemon=True).start()

    def _greet(self, sock: socket.socket, place: int) -> None:
        stream: Stream | None = None
        try:
            stream = self._streams.accept(sock)
            head = stream.receive_head(MAX_OPENING_BYTES)
            number, source = int(head["plan"]), str(head["source"])
        except Exception:
            (stream or sock).close()
            return
        finally:
            with self._places:
                self._strangers.leave(place)
        with self.changed:
            incoming = self._incoming.get(number)
            if number <= self._over:
                stream.close()
            elif incoming is None:
                self._early.setdefault(number, {})[source] = stream
            else:
                self._serve(incoming, source, stream)

    def _serve(self, incoming: Incoming, source: str, stream: Stream) -> None:
        threading.Thread(
            target=self._receive, args=(incoming, source, stream), name="shoal-receive", daemon=True
        ).start()

    def _receive(self, incoming: Incoming, source: str, stream: Stream) -> None:
        try:
            while not self._receive_window(incoming, source, stream):
                pass
        except Exception as error:
            with self.changed:
                if not isinstance(error, (OSError, WireError)):
                    incoming.failure = incoming.failure or error
                incoming.broken = incoming.broken or f"from {source}: {error}"
                self.changed.notify_all()
        finally:
            stream.close()

    def _receive_window(self, incoming: Incoming, source: str, stream: Stream) -> bool:
        """Receive one window. Returns whether it was the last one."""
        opening = stream.receive_head()
        step = int(opening["window"])
        with self.changed:
            incoming.windows.setdefault(step, {})[source] = opening
            self.changed.notify_all()
            self.changed.wait_for(lambda: incoming.gate >= step or incoming.is_broken())
            state = incoming.state
            if incoming.is_broken() or state is None:
                return True
        while "end" not in (head := stream.receive_head()):
            if "sum" in head:
                index, low, high = head["sum"]
                stream.receive_into(as_bytes(incoming.flats[index][low:high]))
                continue
            received, homes = state.unpack(head["pieces"])
            for home in homes:
                stream.receive_into(as_bytes(home))
            with self.changed:
                if incoming.is_broken():
                    return True  # nothing more may be written into the state
                incoming.arrived += [(step, got) for got in received]
        with self.changed:
            if int(head["end"]) != step:
                raise ValueError("the end of another window")
            incoming.ended[source] = step
            incoming.ends.setdefault(step, {})[source] = head
            self.changed.notify_all()
        return bool(opening["final"])


def _cut(sock: socket.socket) -> None:
    """End a connection that another thread reads from."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
