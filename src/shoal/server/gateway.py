"""The one port of the control plane that other machines connect to, inside TLS: agents, and workers of live jobs."""

from __future__ import annotations

import asyncio
import logging
import ssl

from shoal.agents.fleet import AgentExecutor
from shoal.agents.link import AGENT, JOIN, StreamLink
from shoal.wire.auth import AuthError
from shoal.wire.channel import HANDSHAKE_TIMEOUT_S, AsyncChannel, accept_async
from shoal.wire.messages import WireError
from shoal.wire.service import ControlService
from shoal.wire.strangers import Strangers

log = logging.getLogger("shoal.server")


class Gateway:
    def __init__(self, service: ControlService, executor: AgentExecutor) -> None:
        self._service, self._executor = service, executor
        self._server: asyncio.Server | None = None
        self._strangers = Strangers()
        self._connections: set[asyncio.Task[None]] = set()

    async def listen(self, host: str, port: int, tls: ssl.SSLContext) -> int:
        """Return the port."""
        self._server = await asyncio.start_server(
            self._accept, host or None, port, ssl=tls, ssl_handshake_timeout=HANDSHAKE_TIMEOUT_S
        )
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in list(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def _secret_of(self, job: str, purpose: str) -> bytes | None:
        if purpose in (JOIN, AGENT):
            return self._executor.secret_of(job, purpose)
        return self._service.secret_of(job, purpose)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task: asyncio.Task[None] | None = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        peer = writer.get_extra_info("peername")
        try:
            place = self._strangers.enter((peer or ("",))[0], writer.transport.abort)
            try:
                request, keys = await accept_async(reader, writer, self._secret_of)
            finally:
                self._strangers.leave(place)
            if request.purpose in (JOIN, AGENT):
                link = StreamLink(reader, writer, keys.client_to_server, keys.server_to_client)
                await self._executor.serve(link, request.purpose, request.job)
            else:
                await self._service.serve(request, AsyncChannel(reader, writer, keys))
        except (OSError, EOFError, TimeoutError, asyncio.CancelledError):
            pass  # the peer has gone, or the server closes
        except (AuthError, WireError) as error:
            log.warning("refused a connection from %s: %s", peer, error)
        finally:
            self._connections.discard(task)
            writer.close()
