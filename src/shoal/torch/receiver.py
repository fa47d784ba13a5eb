"""The newcomer's side of a state transfer: threads that receive pieces into the newcomer's own parameters."""

from __future__ import annotations

import pickle
import socket
import threading
from dataclasses import dataclass, field
from typing import Any

from shoal.torch.packing import as_bytes
from shoal.torch.state import ModelState, Received
from shoal.torch.transfer import PURPOSE, sources_of
from shoal.wire.channel import MAX_STRANGERS, accept, receive_exactly, receive_into
from shoal.wire.messages import Plan
from torch import Tensor

MAX_HEAD_BYTES = 1 << 32


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

    def __init__(self, host: str, job: str, secret: bytes, changed: threading.Condition) -> None:
        self._job, self._secret = job, secret
        self._server = socket.create_server((host, 0))
        self.address = f"{host}:{self._server.getsockname()[1]}"
        self.changed = changed
        self._incoming: dict[int, Incoming] = {}
        self._early: dict[int, dict[str, socket.socket]] = {}
        self._over = 0  # plans up to this number are dropped or complete
        self._strangers = threading.BoundedSemaphore(MAX_STRANGERS)
        threading.Thread(target=self._listen, name="shoal-receive", daemon=True).start()

    def expect(self, plan: Plan, me: str) -> None:
        with self.changed:
            incoming = self._incoming[plan.number] = Incoming(plan, sources_of(plan, me))
            for source, sock in self._early.pop(plan.number, {}).items():
                self._serve(incoming, source, sock)

    def forget(self, number: int) -> None:
        with self.changed:
            self._over = max(self._over, number)
            incoming = self._incoming.pop(number, None)
            if incoming is not None:
                incoming.broken = "the plan was dropped"
            for early in [n for n in self._early if n <= number]:
                for sock in self._early.pop(early).values():
                    sock.close()
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
                sock, _ = self._server.accept()
            except OSError:
                return
            if self._strangers.acquire(blocking=False):
                threading.Thread(target=self._greet, args=(sock,), name="shoal-greet", daemon=True).start()
            else:
                sock.close()

    def _greet(self, sock: socket.socket) -> None:
        try:
            accept(
                sock, lambda job, purpose: self._secret if (job, purpose) == (self._job, PURPOSE) else None
            )
            head = receive_head(sock, 4096)
            number, source = int(head["plan"]), str(head["source"])
        except Exception:
            sock.close()
            return
        finally:
            self._strangers.release()
        with self.changed:
            incoming = self._incoming.get(number)
            if number <= self._over:
                sock.close()
            elif incoming is None:
                self._early.setdefault(number, {})[source] = sock
            else:
                self._serve(incoming, source, sock)

    def _serve(self, incoming: Incoming, source: str, sock: socket.socket) -> None:
        threading.Thread(
            target=self._receive, args=(incoming, source, sock), name="shoal-receive", daemon=True
        ).start()

    def _receive(self, incoming: Incoming, source: str, sock: socket.socket) -> None:
        try:
            while not self._receive_window(incoming, source, sock):
                pass
        except Exception as error:
            with self.changed:
                if not isinstance(error, OSError):
                    incoming.failure = incoming.failure or error
                incoming.broken = incoming.broken or f"from {source}: {error}"
                self.changed.notify_all()
        finally:
            sock.close()

    def _receive_window(self, incoming: Incoming, source: str, sock: socket.socket) -> bool:
        """Receive one window. Returns whether it was the last one."""
        opening = receive_head(sock)
        step = int(opening["window"])
        with self.changed:
            incoming.windows.setdefault(step, {})[source] = opening
            self.changed.notify_all()
            self.changed.wait_for(lambda: incoming.gate >= step or incoming.is_broken())
            state = incoming.state
            if incoming.is_broken() or state is None:
                return True
        while "end" not in (head := receive_head(sock)):
            if "sum" in head:
                index, low, high = head["sum"]
                receive_into(sock, as_bytes(incoming.flats[index][low:high]))
                continue
            received, homes = state.unpack(head["pieces"])
            for home in homes:
                receive_into(sock, as_bytes(home))
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


def receive_head(sock: socket.socket, limit: int = MAX_HEAD_BYTES) -> dict[str, Any]:
    size = int.from_bytes(receive_exactly(sock, 8), "big")
    if size > limit:
        raise ValueError("the description of the state is too long")
    # Unpickling is safe: the sender knows the job's secret.
    head = pickle.loads(receive_exactly(sock, size))
    if not isinstance(head, dict):
        raise ValueError("malformed description")
    return head
