"""Connections that have not proved yet who they are: few, and never in the way of one that does.

A server cannot tell an idle stranger from a worker whose proof is on its way. So a newcomer is never refused. When all
places are taken, it gets the place of the oldest stranger from the address that has the most.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

MAX_STRANGERS = 256


class Strangers:
    """The places of one port. The owner calls `leave` when a connection has proved its identity or has ended."""

    def __init__(self, most: int = MAX_STRANGERS) -> None:
        self._most = most
        self._places: dict[int, tuple[str, Callable[[], None]]] = {}  # in order of arrival
        self._next = 0

    def __len__(self) -> int:
        return len(self._places)

    def enter(self, address: str, close: Callable[[], None]) -> int:
        """Take a place and return its number. `close` ends the connection if another needs the place."""
        if len(self._places) >= self._most:
            self._evict()
        self._next += 1
        self._places[self._next] = (address, close)
        return self._next

    def leave(self, place: int) -> None:
        self._places.pop(place, None)

    def close_all(self) -> None:
        for _, close in self._places.values():
            close()
        self._places.clear()

    def _evict(self) -> None:
        most, _ = Counter(address for address, _ in self._places.values()).most_common(1)[0]
        oldest = next(place for place, (address, _) in self._places.items() if address == most)
        _, close = self._places.pop(oldest)
        close()
