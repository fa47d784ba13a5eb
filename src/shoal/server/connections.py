"""Bounds on the connections of the HTTP server, so that idle or half-open ones cost no client its service.

- A connection whose requests had no valid token so far is a stranger. Strangers have few places (`wire.strangers`).
- One user cannot take the places of all others.
- A connection that does not complete its request in time is closed.
- All connections together leave files for the server's own work: workers, the store, logs.
"""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Callable, Mapping
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from shoal.wire.strangers import MAX_STRANGERS, Strangers

HEAD_S = 10.0
"""How long the head of a request may take, from the first byte or from the beginning of the connection."""
BODY_S = 30.0
"""How long a client may be silent within a body."""
MOST_CONNECTIONS = 8192
BACKLOG = 128
"""asyncio accepts so many connections in one turn, before the first of them can be counted."""

_KEY = "shoal.place"


def raise_file_limit() -> int:
    """Raise the soft limit of open files to the hard limit, and return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return MOST_CONNECTIONS * 4 if hard == resource.RLIM_INFINITY else hard


class Connections:
    """All connections of the HTTP server. The owner of a connection is the address of a stranger, later a user.

    A newcomer is never refused: if all places are taken, whoever has the most connections loses the oldest one.
    """

    def __init__(self, files: int) -> None:
        """`files`: how many files the process may have open. Half of them are reserved for the server's own work."""
        self.most = max(16, min(MOST_CONNECTIONS, files // 2 - BACKLOG))
        most_strangers = min(MAX_STRANGERS, self.most // 2)
        self.strangers = Strangers(most_strangers)
        self.users = Strangers(self.most - most_strangers)

    def __len__(self) -> int:
        return len(self.strangers) + len(self.users)

    def opened(self, address: str, close: Callable[[], None]) -> Place:
        return Place(self, address, close)


class Place:
    """That of one connection."""

    def __init__(self, connections: Connections, address: str, close: Callable[[], None]) -> None:
        self._connections, self._close = connections, close
        self.address = address
        self._user: str | None = None
        self._number = connections.strangers.enter(address, close)

    def proved(self, user: str) -> None:
        """A request on this connection had a valid token of this user. Behind a proxy, many users have the same one."""
        if user != self._user:
            self.left()
            self._user, self._number = user, self._connections.users.enter(user, self._close)

    def left(self) -> None:
        of = self._connections.strangers if self._user is None else self._connections.users
        of.leave(self._number)


def place_of(scope: Mapping[str, Any]) -> Place | None:
    """The place of the connection on which a request came. None: the request came on none, in a test."""
    return scope.get(_KEY)


def _with_place(app: ASGIApp, place: Place) -> ASGIApp:
    async def inner(scope: Scope, receive: Receive, send: Send) -> None:
        scope[_KEY] = place
        await app(scope, receive, send)

    return inner


def protocol_of(connections: Connections) -> type[H11Protocol]:
    """uvicorn's protocol with these bounds."""

    class Bounded(H11Protocol):
        _timer: asyncio.TimerHandle | None = None
        _place: Place

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._place = connections.opened(self.client[0] if self.client else "", transport.abort)
            # Not found by the client's address: behind a proxy, the request names another one.
            self.app = _with_place(self.app, self._place)
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
            self._place.left()
            super().connection_lost(exc)

        def _limit(self, seconds: float | None) -> None:
            """Close the connection unless its request is complete by then. None: it is complete."""
            if self._timer is not None:
                self._timer.cancel()
            self._timer = None if seconds is None else self.loop.call_later(seconds, self.transport.abort)

    return Bounded


def config_of(app: Any, connections: Connections) -> uvicorn.Config:
    """No WebSockets: uvicorn would hand their connections to another protocol, past all these bounds."""
    return uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        http=protocol_of(connections),
        ws="none",
        backlog=BACKLOG,
        timeout_keep_alive=30,
        lifespan="off",
        server_header=False,
    )
