"""Bounds on the connections of the HTTP server, so that idle or half-open ones cost no client its service.

- A connection whose requests had no valid token so far is a stranger. Strangers have few places (`wire.strangers`).
- A connection that does not complete its request in time is closed.
- All connections together leave files for the server's own work: workers, the store, logs.
"""

from __future__ import annotations

import asyncio
import resource
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from shoal.wire.strangers import MAX_STRANGERS, Strangers

HEAD_S = 10.0
"""How long the head of a request may take, from the first byte or from the beginning of the connection."""
BODY_S = 30.0
"""How long a client may be silent within a body."""
MOST_CONNECTIONS = 8192
BACKLOG = 128
"""asyncio accepts so many connections in one turn, before the first of them can be counted."""


def raise_file_limit() -> int:
    """Raise the soft limit of open files to the hard limit, and return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return MOST_CONNECTIONS * 4 if hard == resource.RLIM_INFINITY else hard


class Connections:
    """All connections of the HTTP server."""

    def __init__(self, files: int) -> None:
        """`files`: how many files the process may have open. Half of them are reserved for the server's own work."""
        self.most = max(16, min(MOST_CONNECTIONS, files // 2 - BACKLOG))
        self.strangers = Strangers(min(MAX_STRANGERS, self.most // 2))
        self._open: dict[Any, int] = {}  # by the client's address and port

    def __len__(self) -> int:
        return len(self._open)

    def opened(self, client: Any, transport: asyncio.Transport) -> None:
        place = self.strangers.enter(str(client[0]) if client else "", transport.abort)
        self._open[client] = place
        if len(self._open) > self.most:
            transport.abort()

    def proved(self, client: Any) -> None:
        """A request on this connection had a valid token."""
        if client in self._open:
            self.strangers.leave(self._open[client])

    def closed(self, client: Any) -> None:
        self.strangers.leave(self._open.pop(client, 0))


def protocol_of(connections: Connections) -> type[H11Protocol]:
    """uvicorn's protocol with these bounds."""

    class Bounded(H11Protocol):
        _timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            connections.opened(self.client, transport)
            self._limit(HEAD_S)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.conn.their_state is h11.SEND_BODY:
                self._limit(BODY_S)
            elif self.conn.their_state is not h11.IDLE:
                self._limit(None)
            elif self._timer is None:
                self._limit(HEAD_S)  # the first part of another request

        def connection_lost(self, exc: Exception | None) -> None:
            self._limit(None)
            connections.closed(self.client)
            super().connection_lost(exc)

        def _limit(self, seconds: float | None) -> None:
            """Close the connection unless its request is complete by then. None: it is complete."""
            if self._timer is not None:
                self._timer.cancel()
            self._timer = None if seconds is None else self.loop.call_later(seconds, self.transport.abort)

    return Bounded
