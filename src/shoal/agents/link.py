"""Connections between agents and the control plane: over TCP inside TLS, or in memory for the embedded agent."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from typing import Protocol

from shoal.wire import agent_messages as am
from shoal.wire import tls
from shoal.wire.auth import Keys, Request, Seal
from shoal.wire.channel import SecretOf, accept_async, connect_async, parse_address

JOIN, AGENT = "join", "agent"
"""The purpose of a connection: an agent with a join token, or an agent with its own secret."""
MAX_QUEUED_BYTES = 64 * 1024 * 1024
CONNECT_TIMEOUT_S = 10.0


class Link(Protocol):
    """A connection that has passed the handshake. `receive` raises OSError or EOFError when it has ended."""

    #: The address of the other end; empty within a process.
    peer: str
    #: The secret that the agent's hello has to name, at the agent's end.
    credential: str

    def send(self, message: am.AgentMessage) -> None: ...

    async def receive(self) -> am.AgentMessage: ...

    def close(self) -> None: ...


class StreamLink:
    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key_in: bytes, key_out: bytes
    ) -> None:
        self._reader, self._writer = reader, writer
        self._in, self._out = Seal(key_in), Seal(key_out)
        self.peer = str((writer.get_extra_info("peername") or ("",))[0])
        self.credential = ""

    @classmethod
    async def dial(cls, address: str, secret: bytes, job: str, purpose: str, fingerprint: str) -> StreamLink:
        """Connect inside TLS to the server whose certificate has this fingerprint."""
        host, port = parse_address(address)
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(host, port, ssl=tls.pinned_context())
        try:
            connection = writer.get_extra_info("ssl_object")
            assert isinstance(connection, ssl.SSLObject)
            tls.check_fingerprint(connection, fingerprint)
            keys = await connect_async(reader, writer, secret, job, purpose)
        except BaseException:
            writer.close()
            raise
        return cls(reader, writer, keys.server_to_client, keys.client_to_server)

    @classmethod
    async def answer(
        cls, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret_of: SecretOf
    ) -> tuple[Request, StreamLink]:
        keys: Keys
        request, keys = await accept_async(reader, writer, secret_of)
        return request, cls(reader, writer, keys.client_to_server, keys.server_to_client)

    def send(self, message: am.AgentMessage) -> None:
        """Queue a message. A peer that does not read is disconnected before its queue fills the memory."""
        if self._writer.is_closing():
            return
        self._writer.write(self._out.wrap(am.encode(message)))
        if self._writer.transport.get_write_buffer_size() > MAX_QUEUED_BYTES:
            self._writer.transport.abort()

    async def receive(self) -> am.AgentMessage:
        header = await self._reader.readexactly(Seal.HEADER_BYTES)
        return am.decode(self._in.unwrap(header, await self._reader.readexactly(Seal.body_bytes(header))))

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._writer.close()


class MemoryLink:
    """One end of a connection within a process. Messages are encoded and decoded as on the network."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._peer: MemoryLink | None = None
        self.peer = self.credential = ""

    @staticmethod
    def pair() -> tuple[MemoryLink, MemoryLink]:
        one, other = MemoryLink(), MemoryLink()
        one._peer, other._peer = other, one
        return one, other

    def send(self, message: am.AgentMessage) -> None:
        if self._peer is not None:
            self._peer._queue.put_nowait(am.encode(message))

    async def receive(self) -> am.AgentMessage:
        body = await self._queue.get()
        if body is None:
            self._queue.put_nowait(None)
            raise EOFError("connection closed")
        return am.decode(body)

    def close(self) -> None:
        for end in (self, self._peer):
            if end is not None:
                end._peer = None
                end._queue.put_nowait(None)
