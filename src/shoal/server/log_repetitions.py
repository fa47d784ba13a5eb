"""A limit on repeated log lines: a fault that occurs thousands of times per second must not fill the disk."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

WINDOW_S = 60.0
MOST_PER_WINDOW = 20
MOST_KINDS = 1000


class Repetitions(logging.Filter):
    """Passes the first lines of each kind in each window, and tells how many it left out before the next one.

    Two records are of one kind if they come from the same statement.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._seen: dict[tuple[str, int], tuple[float, int]] = {}  # beginning of the window, records in it

    def filter(self, record: logging.LogRecord) -> bool:
        kind, now_s = (record.pathname, record.lineno), self._clock()
        begin_s, count = self._seen.get(kind, (now_s, 0))
        if now_s - begin_s >= WINDOW_S:
            if count > MOST_PER_WINDOW:
                record.msg = f"{record.msg} ({count - MOST_PER_WINDOW} more of these were left out before)"
            begin_s, count = now_s, 0
        if len(self._seen) > MOST_KINDS:
            self._seen.clear()
        self._seen[kind] = (begin_s, count + 1)
        return count < MOST_PER_WINDOW


def limit_repetitions() -> None:
    """Limit all handlers of this process. Lines of the control loop's cycles are rare by themselves."""
    repetitions = Repetitions()
    for handler in logging.getLogger().handlers:
        handler.addFilter(repetitions)
