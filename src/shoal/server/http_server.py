"""uvicorn as a part of the control plane, which decides when it starts and stops."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import uvicorn

#: Time for open connections to close.
STOP_S = 5.0


class HttpServer(uvicorn.Server):
    """Serves in a task. Installs no signal handlers: the control plane has its own, and closes before HTTP does."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._listening = asyncio.Event()

    async def start(self, sock: socket.socket) -> asyncio.Task[None]:
        """Accept connections. The returned task ends when the server does."""
        serving = asyncio.create_task(self.serve([sock]))
        await self._listening.wait()
        return serving

    async def stop(self, serving: asyncio.Task[None]) -> None:
        """Close all connections and end the task."""
        self.should_exit = self.force_exit = True
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(serving, STOP_S)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._listening.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        try:
            yield
        finally:
            self._listening.set()  # also if it could not start: `start` must not wait forever
