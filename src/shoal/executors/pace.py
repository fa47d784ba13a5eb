"""How many keepers start at the same time on this machine.

A keeper is a Python process: to start it takes a processor for tens of milliseconds. If many start at once, those that
plan, answer and train wait for them. So at most one starts for each two processors, and the others wait in order. A
keeper has started when it closes the pipe that it was given, which the kernel also does for it if it dies.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import deque
from collections.abc import Callable

log = logging.getLogger("shoal.executors")

#: A keeper may hang as it starts, for example in a working directory on a file server that does not answer.
LONGEST_START_S = 5.0


class Pace:
    """Its methods are called on the thread of one event loop."""

    def __init__(self, most: int | None = None) -> None:
        self._most = most or max((os.cpu_count() or 1) // 2, 1)
        self._starting: dict[int, asyncio.TimerHandle] = {}
        self._waiting: deque[Callable[[], None]] = deque()

    @property
    def is_free(self) -> bool:
        return len(self._starting) < self._most

    def when_free(self, start: Callable[[], None]) -> None:
        """Call `start` now or, in order, when fewer keepers start."""
        if self.is_free and not self._waiting:
            start()
        else:
            self._waiting.append(start)

    def watch(self, pipe: int) -> None:
        """A keeper starts that holds the other end of this pipe. The pipe is closed here in the end."""
        loop = asyncio.get_running_loop()
        self._starting[pipe] = loop.call_later(LONGEST_START_S, self._started, pipe)
        loop.add_reader(pipe, self._started, pipe)

    def _started(self, pipe: int) -> None:
        self._starting.pop(pipe).cancel()
        asyncio.get_running_loop().remove_reader(pipe)
        os.close(pipe)
        while self._waiting and self.is_free:
            start = self._waiting.popleft()
            try:
                start()
            except Exception:  # of one worker: those behind it must not wait for ever
                log.exception("a worker was not started")

    def close(self) -> None:
        for pipe, timer in self._starting.items():
            timer.cancel()
            asyncio.get_running_loop().remove_reader(pipe)
            os.close(pipe)
        self._starting.clear()
        self._waiting.clear()
