"""Limits on the size of requests and on their rate per client, checked before anything else."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from fastapi import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shoal.server.api.errors import answer

MAX_BODY_BYTES = 1024 * 1024
TOO_LARGE = f"the request is larger than {MAX_BODY_BYTES} bytes"
RATE_PER_S, BURST = 500.0, 2000.0
MOST_CLIENTS = 10_000


class Buckets:
    """A token bucket per client. Clients not seen for longest are forgotten."""

    def __init__(self, rate_per_s: float, burst: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.rate_per_s, self.burst, self._clock = rate_per_s, burst, clock
        self._level: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, client: str) -> bool:
        now_s = self._clock()
        level, at_s = self._level.pop(client, (self.burst, now_s))
        level = min(self.burst, level + (now_s - at_s) * self.rate_per_s)
        allowed = level >= 1.0
        self._level[client] = (level - 1.0 if allowed else level, now_s)
        if len(self._level) > MOST_CLIENTS:
            self._level.popitem(last=False)
        return allowed


class Limits:
    """ASGI middleware."""

    def __init__(
        self, app: ASGIApp, *, answered: Callable[[int], None], buckets: Buckets | None = None
    ) -> None:
        self.app, self._answered = app, answered
        self._buckets = buckets or Buckets(RATE_PER_S, BURST)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        client = (
            headers.get(b"authorization", b"").decode("latin-1")[:300] or (scope.get("client") or ("",))[0]
        )
        if not self._buckets.take(client):
            text = f"more than {self._buckets.rate_per_s:.0f} requests per second"
            await self._refuse(429, "busy", text, "wait a moment", scope, receive, send)
            return
        length = headers.get(b"content-length", b"")
        if length.isdigit() and int(length) > MAX_BODY_BYTES:
            await self._too_large(scope, receive, send)
            return
        await self._pass_on(scope, receive, send)

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send) -> None:
        seen = 0

        async def counting() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > MAX_BODY_BYTES:
                raise HTTPException(413, TOO_LARGE)  # the only exception that FastAPI does not wrap here
            return message

        async def noting(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._answered(message["status"])
            await send(message)

        await self.app(scope, counting, noting)

    async def _too_large(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._refuse(413, "too_large", TOO_LARGE, "put large things into files", scope, receive, send)

    async def _refuse(
        self, status: int, code: str, text: str, hint: str, scope: Scope, receive: Receive, send: Any
    ) -> None:
        self._answered(status)
        await answer(status, code, text, hint)(scope, receive, send)
