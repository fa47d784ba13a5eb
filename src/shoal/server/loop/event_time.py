"""The time of the event that is being taken in. It may have happened while no server ran."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from shoal.server.loop.live_job import LiveJob


class EventTime:
    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._then_s: float | None = None

    @contextlib.contextmanager
    def as_of(self, then_s: float) -> Iterator[None]:
        """What is taken in within this context happened at `then_s`."""
        self._then_s = then_s
        try:
            yield
        finally:
            self._then_s = None

    def then_s(self, job: LiveJob) -> float:
        """The time of what is being taken in: now, unless `as_of` sets another."""
        now_s = self._now_s()
        return now_s if self._then_s is None else min(max(self._then_s, job.life.settled_s), now_s)
