"""A connection that has passed the handshake, in two forms: blocking (workers) and asyncio (the control plane).

Both run on a plain socket, or inside TLS where the caller passes an `ssl.SSLContext`.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable
from typing import Protocol

from shoal.wire import auth
from shoal.wire.auth import AuthError, ClientProof, Keys, OtherProtocol, Request, Seal
from shoal.wire.messages import PROTOCOL, Message, WireError, decode, encode
from shoal.wire.tls import PinnedTls, TlsStream

HANDSHAKE_TIMEOUT_S = 5.0
SEND_TIMEOUT_S = 10
"""How long a peer that does not read may block the sender."""
SHORT_BYTES = 1 << 16
SecretOf = Callable[[str, str], bytes | None]
"""(job, purpose) -> its secret, or None for an unknown job."""


class Readable(Protocol):
    def recv_into(self, view: memoryview, /) -> int: ...


def parse_address(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise WireError(f"{address!r} is not an address of the form host:port")
    return host.strip("[]"), int(port)


def receive_exactly(sock: Readable, size: int, deadline_s: float | None = None) -> bytes:
    data = bytearray(size)
    receive_into(sock, memoryview(data), deadline_s)
    return bytes(data)


def receive_into(sock: Readable, view: memoryview, deadline_s: float | None = None) -> None:
    """Fill `view`. `deadline_s` (of time.monotonic) limits the whole read, so a peer cannot stall it byte by byte."""
    while view:
        if deadline_s is not None and isinstance(sock, socket.socket):
            sock.settimeout(max(0.001, deadline_s - time.monotonic()))
        count = sock.recv_into(view)
        if not count:
            raise ConnectionError("connection closed")
        view = view[count:]


def connect(
    address: str,
    secret: bytes,
    job: str,
    purpose: str,
    timeout_s: float = 10.0,
    tls: ssl.SSLContext | PinnedTls | None = None,
) -> tuple[socket.socket, Keys]:
    """Connect. Both ends prove that they know the secret, within `timeout_s`: the other may not be who it should be."""
    host, port = parse_address(address)
    deadline_s = time.monotonic() + timeout_s
    sock = socket.create_connection((host, port), timeout=timeout_s)
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if tls is not None:
            sock = tls.wrap_socket(sock, server_hostname=host)
        keys = prove(sock, secret, job, purpose, deadline_s)
        sock.settimeout(None)
    except BaseException:
        sock.close()
        raise
    return sock, keys


def prove(sock: socket.socket, secret: bytes, job: str, purpose: str, deadline_s: float) -> Keys:
    """The client's side of the handshake on an open connection, until `deadline_s` (of time.monotonic)."""
    challenge = receive_exactly(sock, auth.CHALLENGE_BYTES, deadline_s)
    proof = ClientProof.make(challenge, secret, job, purpose)
    _send_short(sock, proof.request)
    return proof.check(_receive_short(sock, deadline_s))


def accept(sock: socket.socket, secret_of: SecretOf) -> tuple[Request, Keys]:
    """The server's side of `connect`, for an accepted socket."""
    deadline_s = time.monotonic() + HANDSHAKE_TIMEOUT_S
    sock.settimeout(HANDSHAKE_TIMEOUT_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    hello, nonce = auth.challenge()
    sock.sendall(hello)
    try:
        request, answer, keys = _judge(_receive_short(sock, deadline_s), secret_of, nonce)
    except AuthError as error:
        _send_short(sock, f"refused: {error}".encode())
        raise
    _send_short(sock, answer)
    sock.settimeout(None)
    return request, keys


def _judge(
    body: bytes, secret_of: SecretOf, nonce: bytes, protocol: int = PROTOCOL
) -> tuple[Request, bytes, Keys]:
    request = Request.parse(body, protocol)
    # An unknown job and a wrong secret get the same answer, so that nobody can probe for names of jobs.
    secret = secret_of(request.job, request.purpose) or auth.new_secret()
    try:
        answer, keys = request.prove(secret, nonce)
    except AuthError as error:
        error.claim = (request.job, request.purpose)
        raise
    return request, answer, keys


def _send_short(sock: socket.socket, body: bytes) -> None:
    sock.sendall(len(body).to_bytes(2, "big") + body)


def _receive_short(sock: socket.socket, deadline_s: float | None = None) -> bytes:
    size = int.from_bytes(receive_exactly(sock, 2, deadline_s), "big")
    if size > auth.MAX_HANDSHAKE_BYTES:
        raise AuthError("malformed handshake")
    return receive_exactly(sock, size, deadline_s)


async def accept_async(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    secret_of: SecretOf,
    protocol: int = PROTOCOL,
) -> tuple[Request, Keys]:
    """The server's side of the handshake, in asyncio."""
    sock = writer.get_extra_info("socket")
    if sock is not None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    hello, nonce = auth.challenge(protocol)
    writer.write(hello)
    async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
        size = int.from_bytes(await reader.readexactly(2), "big")
        if size > auth.MAX_HANDSHAKE_BYTES:
            raise AuthError("malformed handshake")
        body = await reader.readexactly(size)
        try:
            request, answer, keys = _judge(body, secret_of, nonce, protocol)
        except AuthError as error:
            refusal = f"refused: {error}".encode()
            writer.write(len(refusal).to_bytes(2, "big") + refusal)
            await writer.drain()
            raise
        writer.write(len(answer).to_bytes(2, "big") + answer)
        await writer.drain()
    return request, keys


async def connect_async(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes, job: str, purpose: str
) -> Keys:
    """The client's side of the handshake, in asyncio."""
    async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
        challenge = await reader.readexactly(auth.CHALLENGE_BYTES)
        try:
            proof = ClientProof.make(challenge, secret, job, purpose)
        except OtherProtocol:
            reply = await _ask_async(reader, writer, ClientProof.farewell(job, purpose))
            raise OtherProtocol(reply.decode(errors="replace")[:300]) from None
        return proof.check(await _ask_async(reader, writer, proof.request))


async def _ask_async(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes) -> bytes:
    writer.write(len(request).to_bytes(2, "big") + request)
    size = int.from_bytes(await reader.readexactly(2), "big")
    if size > auth.MAX_HANDSHAKE_BYTES:
        raise AuthError("malformed handshake")
    return await reader.readexactly(size)


class Channel:
    """Blocking, for a worker or a client. One thread may receive while others send."""

    def __init__(self, sock: socket.socket, keys: Keys) -> None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", SEND_TIMEOUT_S, 0))
        # Without it a reader would wait for a machine that has lost its network, or its power, for hours.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
            if hasattr(socket, option):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        self._sock = TlsStream(sock, SEND_TIMEOUT_S) if isinstance(sock, ssl.SSLSocket) else sock
        self._out, self._in = Seal(keys.client_to_server), Seal(keys.server_to_client)
        self._sending = threading.Lock()

    @classmethod
    def open(
        cls,
        address: str,
        secret: bytes,
        job: str,
        purpose: str,
        timeout_s: float = 10.0,
        tls: ssl.SSLContext | PinnedTls | None = None,
    ) -> Channel:
        return cls(*connect(address, secret, job, purpose, timeout_s, tls))

    def send(self, message: Message) -> None:
        self.send_frame(encode(message))

    def receive(self) -> Message:
        return decode(self.receive_frame())

    def send_frame(self, body: bytes) -> None:
        """Send bytes that are not a message."""
        with self._sending:
            self._sock.sendall(self._out.wrap(body))

    def receive_frame(self) -> bytes:
        header = receive_exactly(self._sock, Seal.HEADER_BYTES)
        return self._in.unwrap(header, receive_exactly(self._sock, Seal.body_bytes(header)))

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()


class AsyncChannel:
    """The server's end, in asyncio. TLS, if any, is the business of the asyncio server."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        keys: Keys,
        protocol: int = PROTOCOL,
    ) -> None:
        self._reader, self._writer, self._protocol = reader, writer, protocol
        self._in, self._out = Seal(keys.client_to_server), Seal(keys.server_to_client)

    @classmethod
    async def accept(
        cls,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        secret_of: SecretOf,
        protocol: int = PROTOCOL,
    ) -> tuple[Request, AsyncChannel]:
        request, keys = await accept_async(reader, writer, secret_of, protocol)
        return request, cls(reader, writer, keys, protocol)

    def send(self, message: Message) -> None:
        """Queue a message. A peer that does not read is disconnected before its queue fills the memory."""
        if self._writer.is_closing():
            return
        self._writer.write(self._out.wrap(encode(message, self._protocol)))
        if self._writer.transport.get_write_buffer_size() > 64 * 1024 * 1024:
            self._writer.transport.abort()

    async def receive(self) -> Message:
        return decode(await self.receive_frame())

    async def send_frame(self, body: bytes) -> None:
        """Send bytes that are not a message. Waits until the peer has read most of those before."""
        self._writer.write(await asyncio.to_thread(self._out.wrap, body))
        await self._writer.drain()

    async def receive_frame(self) -> bytes:
        header = await self._reader.readexactly(Seal.HEADER_BYTES)
        body = await self._reader.readexactly(Seal.body_bytes(header))
        if len(body) < SHORT_BYTES:
            return self._in.unwrap(header, body)
        return await asyncio.to_thread(self._in.unwrap, header, body)  # its MAC takes a while

    def close(self) -> None:
        self._writer.close()
