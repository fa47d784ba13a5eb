"""Events that wait for the next cycle, and when that cycle begins."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable

from shoal.core.events import Event, Timer

#: Events that arrive within this time after a cycle are decided together.
COALESCE_S = 0.02


class Inbox:
    def __init__(self, cycle: Callable[[], None], may_decide: Callable[[], bool]) -> None:
        """`cycle` takes the events and decides; it is called as soon as `may_decide` and the last cycle allow."""
        self._cycle, self._may_decide = cycle, may_decide
        #: Each event with the id of the store's event that records it, if one does.
        self._events: list[tuple[Event, int | None]] = []
        self._since = 0.0
        self._next: asyncio.TimerHandle | asyncio.Handle | None = None
        self._wake: asyncio.TimerHandle | None = None
        self._last_cycle_s = 0.0

    def __bool__(self) -> bool:
        """Whether events wait or a cycle is due."""
        return bool(self._events) or self._next is not None

    def put(self, *events: Event, recorded_as: int | None = None) -> None:
        """Decide on these events as soon as this turn of the event loop is over."""
        if not self._events:
            self._since = time.perf_counter()
        self._events += [(event, recorded_as) for event in events]
        if self._next is None and self._may_decide():
            loop = asyncio.get_running_loop()
            wait_s = self._last_cycle_s + COALESCE_S - loop.time()
            self._next = loop.call_later(wait_s, self._run) if wait_s > 0 else loop.call_soon(self._run)

    def _run(self) -> None:
        self._next = None
        self._cycle()

    def take(self) -> tuple[list[tuple[Event, int | None]], float]:
        """The events, and when the first of them arrived (`time.perf_counter`)."""
        taken, self._events = self._events, []
        return taken, self._since

    def cycle_done(self) -> None:
        self._last_cycle_s = asyncio.get_running_loop().time()

    def wake_at(self, wake_s: float, now_s: float) -> None:
        """Decide again at this time, even if no event arrives."""
        if self._wake is not None:
            self._wake.cancel()
            self._wake = None
        if math.isfinite(wake_s):
            delay_s = max(wake_s - now_s, COALESCE_S)
            self._wake = asyncio.get_running_loop().call_later(delay_s, self.put, Timer())

    def close(self) -> None:
        for handle in (self._next, self._wake):
            if handle is not None:
                handle.cancel()
