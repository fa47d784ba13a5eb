"""Wakes open streams when there are new events. Streams read the events from the store, so they miss none."""

from __future__ import annotations

import asyncio
from typing import Any

MOST_STREAMS = 500
MOST_STREAMS_OF_USER = 100


class Hub:
    def __init__(self) -> None:
        self._waiting: set[asyncio.Future[None]] = set()
        self._streams: dict[str, int] = {}
        self.last_id = 0
        self.closed = False

    def publish(self, rows: list[dict[str, Any]]) -> None:
        self.last_id = max(self.last_id, *(row["id"] for row in rows))
        self._wake_all()

    def close(self) -> None:
        """End all streams: the server ends. Clients resume with the id of the last event they received."""
        self.closed = True
        self._wake_all()

    def _wake_all(self) -> None:
        waiting, self._waiting = self._waiting, set()
        for future in waiting:
            if not future.done():
                future.set_result(None)

    async def wait(self, timeout_s: float) -> bool:
        """Wait for new events; False after the timeout."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.add(future)
        try:
            await asyncio.wait_for(future, timeout_s)
        except TimeoutError:
            return False
        finally:
            self._waiting.discard(future)
        return True

    @property
    def streams(self) -> int:
        """How many are open."""
        return sum(self._streams.values())

    def enter(self, user: str) -> bool:
        """Count one more open stream; False if there are too many."""
        mine = self._streams.get(user, 0)
        if mine >= MOST_STREAMS_OF_USER or self.streams >= MOST_STREAMS:
            return False
        self._streams[user] = mine + 1
        return True

    def leave(self, user: str) -> None:
        self._streams[user] -= 1
        if not self._streams[user]:
            del self._streams[user]
