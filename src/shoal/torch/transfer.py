"""The holder's side of a state transfer: a thread that sends to one newcomer beside the training.

From one optimizer step to the next, parameters and optimizer state do not change. In this *window* a holder sends
pieces of them from the live tensors, and then the summed gradients of the step. The end of its backward waits for the
piece that is being sent and for the sums, as the script may change both from there on. Then the window ends, and the
next one continues with the rest. The newcomer applies each step's gradients to the pieces it has received, so each
piece is sent once. The final window carries the rest, and at its end a description of everything else.

A link carries heads (see stream.py): `window` opens a window, `pieces` is followed by the bytes of their large tensors,
`sum` by a part of a bucket of gradients, `end` closes the window.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shoal.torch.packing import Piece, as_bytes
from shoal.torch.state import ModelState
from shoal.torch.stream import Stream, Streams
from shoal.wire.messages import Plan
from torch import Tensor

MAX_SOURCES = 4
# Large parameters are cut to this size where the optimizer allows it; small ones are sent together.
PIECE_BYTES = 1 << 20
MOST_PIECES = 1000  # very large models are cut into larger pieces
SPREAD = 4  # a window carries at most a quarter of the bytes, so that no single step has the whole cost
SLICE_BYTES = 1 << 18
BUFFER_BYTES = 1 << 20  # small: a newcomer waits for what is in the socket's buffer when the window has ended
ONE_STEP_BYTES = 16 << 20
ONE_STEP_S = 0.05


def sources_of(plan: Plan, newcomer: str) -> tuple[str, ...]:
    """The holders that send to a newcomer: at most a few, and different ones for different newcomers.

    With shard groups, those that have its shard. In a first generation rank 0 has everything.
    """
    rank = plan.members.index(newcomer)
    holders = plan.holders[rank % plan.group :: plan.group] or plan.members[:1]
    first = rank // plan.group * MAX_SOURCES
    count = min(MAX_SOURCES, len(holders))
    return tuple(holders[(first + i) % len(holders)] for i in range(count))


def share_of(sizes: list[int], sources: int, index: int) -> list[int]:
    """The pieces, of these sizes, that the index-th of several sources sends: about its share of the bytes."""
    total, offset = max(1, sum(sizes)), 0
    mine = []
    for piece, size in enumerate(sizes):
        if min(sources - 1, (2 * offset + size) * sources // (2 * total)) == index:
            mine.append(piece)
        offset += size
    return mine


def together(sizes: list[int], limit_bytes: float) -> list[range]:
    """Runs of neighbours that are sent together, up to the limit."""
    runs: list[range] = []
    run_bytes = 0
    for i, size in enumerate(sizes):
        if not runs or run_bytes + size > limit_bytes:
            runs.append(range(i, i + 1))
            run_bytes = size
        else:
            runs[-1] = range(runs[-1].start, i + 1)
            run_bytes += size
    return runs


@dataclass(frozen=True, slots=True)
class Window:
    """From the boundary after `step` steps to the next optimizer step. `final`: the rest is sent in it."""

    step: int
    final: bool
    head: dict[str, Any]
    sums: int = 0  # buckets of summed gradients that end it


class Link:
    """A holder's connection to one newcomer for one plan, and the thread that sends on it."""

    def __init__(self, newcomer: str, stream: Stream, limit_bytes_per_s: float | None = None) -> None:
        self.newcomer, self._stream, self._limit = newcomer, stream, limit_bytes_per_s
        self._changed = threading.Condition()
        self._state: ModelState | None = None
        self.index = 0  # among the newcomer's sources; the first one sends the description
        self._rest: deque[tuple[list[Piece], int]] = deque()
        self._rest_bytes, self._budget_bytes = 0, 0.0
        self._windows: deque[Window] = deque()
        self._holding = False
        self._reading = False  # a piece is being sent from the live tensors
        self._sums: deque[Tensor] = deque()  # summed gradients of this step that are still to be sent
        self._sources = 1
        self._ends: dict[int, dict[str, Any]] = {}  # step -> content of the head that ends its window
        self._over = False
        self._sent_bytes, self._sending_s = 0, 0.0

    @staticmethod
    def open(plan: Plan, newcomer: str, me: str, streams: Streams, limit: float | None) -> Link:
        stream = streams.open(plan.addresses[newcomer], BUFFER_BYTES)
        stream.send_head({"plan": plan.number, "source": me})
        link = Link(newcomer, stream, limit)
        # Not at the switch: there the training thread would wait for the new thread.
        threading.Thread(target=link._run, name="shoal-state", daemon=True).start()
        return link

    # The training thread's side

    def load(self, plan: Plan, me: str, state: ModelState) -> None:
        """Decide what this link sends."""
        sources = sources_of(plan, self.newcomer)
        self._state, self._sources, self.index = state, len(sources), sources.index(me)
        limit_bytes = max(PIECE_BYTES, sum(state.sizes()) / MOST_PIECES)
        if self._limit is not None:
            limit_bytes = min(limit_bytes, self._limit * ONE_STEP_S)
        pieces = state.pieces(limit_bytes)
        mine = [pieces[i] for i in share_of([size for _, size in pieces], len(sources), self.index)]
        self._rest = deque(
            ([mine[i][0] for i in run], sum(mine[i][1] for i in run))
            for run in together([size for _, size in mine], limit_bytes)
        )
        self._rest_bytes = sum(size for _, size in mine)
        self._budget_bytes = max(PIECE_BYTES, self._rest_bytes / SPREAD)

    @property
    def nearly_done(self) -> bool:
        """Whether one window is enough for the rest, so that the training hardly waits at its end."""
        limit_bytes = min(self._budget_bytes, ONE_STEP_BYTES)
        if self._limit is not None:
            limit_bytes = min(limit_bytes, self._limit * ONE_STEP_S)
        if self._sending_s > 0:
            limit_bytes = min(limit_bytes, self._sent_bytes / self._sending_s * ONE_STEP_S)
        return self._over or self._rest_bytes <= limit_bytes

    def open_window(self, window: Window) -> None:
        with self._changed:
            self._windows.append(window)
            self._holding = False
            self._changed.notify_all()

    def end_with(self, window_step: int, end: dict[str, Any]) -> None:
        """Set what ends a window. A final one ends when this is set and everything is sent."""
        with self._changed:
            self._ends.setdefault(window_step, end)
            self._changed.notify_all()

    def hold(self) -> None:
        """Begin no further piece in this window, unless it is the final one: the optimizer step is near."""
        self._holding = True

    def give(self, flat: Tensor) -> None:
        """The next summed bucket; each of the newcomer's sources sends a part. It must not change until it is read."""
        with self._changed:
            self._sums.append(flat)
            self._changed.notify_all()

    def close_window(self, window_step: int, end: dict[str, Any], interrupted: Callable[[], bool]) -> None:
        """Wait until the link reads nothing of the state any more. The end of the window is sent later."""
        self.end_with(window_step, end)
        self.wait_read(window_step, interrupted)

    def wait_read(self, window_step: int, interrupted: Callable[[], bool]) -> None:
        """Wait for the piece that is being sent, in a final window for all pieces, and for the sums."""
        with self._changed:
            final = any(w.final for w in self._windows if w.step == window_step)
            while not self._changed.wait_for(
                lambda: self._over or not (self._reading or self._sums or (final and self._rest)), 0.05
            ):
                if interrupted():
                    self.close()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.shutdown(socket.SHUT_RDWR)
        with self._changed:
            self._over = True
            self._changed.notify_all()

    # The sending thread's side

    def _run(self) -> None:
        try:
            while (window := self._next_window()) is not None:
                self._stream.send_head({"window": window.step, "final": window.final, **window.head})
                left_bytes = self._budget_bytes
                while self._may_read(window, left_bytes):
                    pieces, size = self._rest[0]
                    self._send_pieces(pieces)
                    left_bytes -= size
                    self._has_read(size)
                for index in range(window.sums):
                    self._send_sum(index)
                end = self._wait_for_end(window)
                if end is None:
                    return
                self._stream.send_head({"end": window.step, **end})
                with self._changed:
                    self._windows.popleft()
                    self._over = self._over or window.final
                    self._changed.notify_all()
        except (OSError, ValueError):
            pass  # the newcomer is gone, or this link was closed; the coordinator handles both
        finally:
            with self._changed:
                self._over = True
                self._changed.notify_all()
            with contextlib.suppress(OSError):
                self._stream.shutdown(socket.SHUT_WR)
            self._stream.close()

    def _next_window(self) -> Window | None:
        with self._changed:
            self._changed.wait_for(lambda: self._windows or self._over)
            return None if self._over else self._windows[0]

    def _may_read(self, window: Window, left_bytes: float) -> bool:
        with self._changed:
            open_still = left_bytes > 0 and not self._holding and window.step not in self._ends
            self._reading = bool(self._rest) and not self._over and (window.final or open_still)
            return self._reading

    def _has_read(self, size: int) -> None:
        with self._changed:
            self._reading = False
            self._rest.popleft()
            self._rest_bytes -= size
            self._changed.notify_all()

    def _wait_for_end(self, window: Window) -> dict[str, Any] | None:
        with self._changed:
            self._changed.wait_for(lambda: window.step in self._ends or self._over)
            return None if self._over else self._ends[window.step]

    def _send_sum(self, index: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._sums or self._over)
            if self._over:
                raise ConnectionError("the link was closed")
            flat = self._sums[0]
        low, high = (flat.numel() * i // self._sources for i in (self.index, self.index + 1))
        self._stream.send_head({"sum": (index, low, high)})
        self._stream.send(as_bytes(flat[low:high]))
        with self._changed:
            self._sums.popleft()
            self._changed.notify_all()

    def _send_pieces(self, pieces: list[Piece]) -> None:
        assert self._state is not None
        capture = self._state.pack(pieces)
        began_s = time.monotonic()
        self._stream.send_head({"pieces": capture.description})
        sent_bytes = len(capture.description)
        self._keep_to_limit(began_s, sent_bytes)
        for tensor in capture.large:
            data = as_bytes(tensor)
            size = SLICE_BYTES if self._limit else max(1, len(data))
            for low in range(0, len(data), size):
                self._stream.send(data[low : low + size])
                sent_bytes += len(data[low : low + size])
                self._keep_to_limit(began_s, sent_bytes)
        self._sent_bytes += sent_bytes
        self._sending_s += time.monotonic() - began_s

    def _keep_to_limit(self, began_s: float, sent_bytes: int) -> None:
        if self._limit:
            time.sleep(max(0.0, began_s + sent_bytes / self._limit - time.monotonic()))
