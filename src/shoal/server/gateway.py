"""The one port of the control plane that other machines connect to, inside TLS: agents, and workers of live jobs."""

from __future__ import annotations

import ssl

from shoal.agents.fleet import AgentExecutor
from shoal.agents.link import AGENT, JOIN, StreamLink
from shoal.wire.channel import AsyncChannel
from shoal.wire.listener import Connection, Listener
from shoal.wire.service import ControlService


class Gateway:
    def __init__(self, service: ControlService, executor: AgentExecutor) -> None:
        self._service, self._executor = service, executor
        self.listener = Listener(self._secret_of, self._serve, executor.handshake_failed)

    async def listen(self, host: str, port: int, tls: ssl.SSLContext) -> int:
        """Return the port."""
        _, bound = await self.listener.listen(host, port, tls)
        return bound

    async def close(self) -> None:
        await self.listener.close()

    def _secret_of(self, job: str, purpose: str) -> bytes | None:
        if purpose in (JOIN, AGENT):
            return self._executor.secret_of(job, purpose)
        return self._service.secret_of(job, purpose)

    async def _serve(self, made: Connection) -> None:
        request, keys = made.request, made.keys
        if request.purpose in (JOIN, AGENT):
            link = StreamLink(made.reader, made.writer, keys.client_to_server, keys.server_to_client)
            await self._executor.serve(link, request.purpose, request.job)
        else:
            await self._service.serve(request, AsyncChannel(made.reader, made.writer, keys))
