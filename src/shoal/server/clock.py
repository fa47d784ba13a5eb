"""The server's clock: seconds since 1970 that never go back, however the machine's clock is set meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime


class Clock:
    """Reads the wall clock once and counts on monotonically; `floor_s` is a time known to have passed already.

    The floor is the last moment in the store: after a restart with the machine's clock set back, time goes on
    from there instead of repeating itself.
    """

    def __init__(
        self,
        floor_s: float = 0.0,
        *,
        wall: Callable[[], float] = time.time,
        steady: Callable[[], float] = time.monotonic,
    ) -> None:
        self._steady = steady
        self._offset = max(wall(), floor_s) - steady()

    def now_s(self) -> float:
        return self._offset + self._steady()


def as_time(seconds: float | None) -> datetime | None:
    """Seconds since 1970 as the API writes them."""
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC)
