"""A port of the wire, on which strangers cost little.

A connection counts as a stranger from the moment it is accepted: asyncio's own server would report it only after its
TLS handshake, and one that never begins it would cost a file that nobody counts.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any

from shoal.wire.auth import AuthError, Keys, Request
from shoal.wire.channel import HANDSHAKE_TIMEOUT_S, SecretOf, accept_async
from shoal.wire.messages import PROTOCOL, WireError
from shoal.wire.strangers import Strangers

log = logging.getLogger("shoal.wire")

BACKLOG = 128
#: How long to wait if the process or the machine has no more files.
NO_FILES_S = 0.2


@dataclass(frozen=True, slots=True)
class Connection:
    """A connection whose other end has proved who it is."""

    request: Request
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    keys: Keys
    protocol: int


class Listener:
    """Accepts connections on any number of ports. `serve` gets those that have proved who they are."""

    def __init__(
        self,
        secret_of: SecretOf,
        serve: Callable[[Connection], Awaitable[None]],
        on_refused: Callable[[str, AuthError], None] = lambda address, error: None,
    ) -> None:
        """`on_refused` receives the address of a peer that could not prove who it is."""
        self._secret_of, self._serve, self._on_refused = secret_of, serve, on_refused
        self._sockets: list[socket.socket] = []
        self.strangers = Strangers()
        self.connections: set[asyncio.Task[None]] = set()

    async def listen(
        self, host: str, port: int, tls: ssl.SSLContext | None = None, protocol: int = PROTOCOL
    ) -> tuple[str, int]:
        """Listen on all addresses of `host`, inside TLS if a context is given. Return the first one and the port."""
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        opened = _open_sockets(found)
        for sock in opened:
            loop.add_reader(sock, self._accept, sock, tls, protocol)
        self._sockets += opened
        bound = opened[0].getsockname()
        return str(bound[0]), int(bound[1])

    async def close(self) -> None:
        for sock in self._sockets:
            asyncio.get_running_loop().remove_reader(sock)
            sock.close()
        self.strangers.close_all()  # a task that is cancelled before it began closes nothing itself
        for task in list(self.connections):
            task.cancel()
        await asyncio.gather(*self.connections, return_exceptions=True)

    def _accept(self, listening: socket.socket, tls: ssl.SSLContext | None, protocol: int) -> None:
        loop = asyncio.get_running_loop()
        try:
            sock, peer = listening.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as error:
            log.error("cannot accept connections: %s", error.strerror)
            loop.remove_reader(listening)
            loop.call_later(NO_FILES_S, self._accept_again, listening, tls, protocol)
            return
        sock.setblocking(False)
        place = self.strangers.enter(str(peer[0]), lambda: _hang_up(sock))
        task = loop.create_task(self._converse(sock, str(peer[0]), place, tls, protocol))
        self.connections.add(task)
        task.add_done_callback(self.connections.discard)

    def _accept_again(self, listening: socket.socket, tls: ssl.SSLContext | None, protocol: int) -> None:
        if listening.fileno() >= 0:
            asyncio.get_running_loop().add_reader(listening, self._accept, listening, tls, protocol)

    async def _converse(
        self, sock: socket.socket, address: str, place: int, tls: ssl.SSLContext | None, protocol: int
    ) -> None:
        writer: asyncio.StreamWriter | None = None
        try:
            try:
                reader, writer = await _streams(sock, tls)
                request, keys = await accept_async(reader, writer, self._secret_of, protocol)
            finally:
                self.strangers.leave(place)
            await self._serve(Connection(request, reader, writer, keys, protocol))
        except (OSError, EOFError, TimeoutError, asyncio.CancelledError):
            pass  # the peer has gone, or this end closes
        except AuthError as error:
            log.warning("refused a connection from %s: %s", address, error)
            self._on_refused(address, error)
        except WireError as error:
            log.warning("cut a connection from %s: %s", address, error)
        finally:
            if writer is not None:
                writer.close()


def _open_sockets(found: Iterable[tuple[int, int, int, str, tuple[Any, ...]]]) -> list[socket.socket]:
    """One socket for each address, all on one port."""
    opened: list[socket.socket] = []
    try:
        for family, kind, number, _, address in dict.fromkeys(found):
            port = opened[0].getsockname()[1] if opened else address[1]
            sock = socket.socket(family, kind, number)
            opened.append(sock)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            sock.bind((address[0], port, *address[2:]))
            sock.listen(BACKLOG)
            sock.setblocking(False)
    except OSError:
        for sock in opened:
            sock.close()
        raise
    return opened


async def _streams(
    sock: socket.socket, tls: ssl.SSLContext | None
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(reader)
    timeout_s = None if tls is None else HANDSHAKE_TIMEOUT_S
    transport, _ = await loop.connect_accepted_socket(
        lambda: protocol, sock, ssl=tls, ssl_handshake_timeout=timeout_s
    )
    return reader, asyncio.StreamWriter(transport, protocol, reader, loop)


def _hang_up(sock: socket.socket) -> None:
    """End a connection, whatever it waits for: it reads the end of its input."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
