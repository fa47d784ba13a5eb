"""What is checked of a request before its body is read: its rate, the host it names, its token and its size."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable

from fastapi import HTTPException, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shoal.server.api.auth import Gate, Who
from shoal.server.api.errors import answer
from shoal.server.connections import place_of
from shoal.server.services.errors import Unauthorized

MAX_BODY_BYTES = 1024 * 1024
RATE_PER_S, BURST = 500.0, 2000.0
MOST_CLIENTS = 10_000


def too_large(most_bytes: int) -> str:
    return f"the request is larger than {most_bytes} bytes"


def address_of(scope: Scope) -> str:
    """The peer address of the connection. Headers are not trusted, because a client can set them."""
    place = place_of(scope)
    return place.address if place is not None else (scope.get("client") or ("",))[0]


class Buckets:
    """A token bucket per client: a valid token, or an address without one. Those not seen for longest are forgotten."""

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


class Hosts:
    """The names of this server. A web page of another name must not reach it through a changed DNS entry.

    An address is always allowed: no DNS entry can lead a browser to it under another name.
    """

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._names = {"localhost", socket.gethostname().lower()} | {n.lower() for n in names}

    def allows(self, header: str) -> bool:
        name = header.rpartition(":")[0] if header.rpartition(":")[2].isdigit() else header
        name = name.strip("[]").lower()
        with contextlib.suppress(ValueError):
            ipaddress.ip_address(name)
            return True
        return not name or name in self._names  # browsers always send a name


class Limits:
    """ASGI middleware."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        prefix: str,
        gate: Gate,
        hosts: Hosts,
        answered: Callable[[int], None],
        buckets: Buckets | None = None,
        upload_bytes: int = MAX_BODY_BYTES,
    ) -> None:
        self.app, self._answered = app, answered
        self._prefix, self._gate, self._hosts = prefix, gate, hosts
        self._buckets = buckets or Buckets(RATE_PER_S, BURST)
        self._upload_bytes = upload_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        refusal = self._refusal(scope, dict(scope["headers"]))
        if refusal is None:
            await self._pass_on(scope, receive, send)
            return
        refusal.headers["Connection"] = "close"  # the body was not read
        self._answered(refusal.status_code)
        await refusal(scope, receive, send)

    def _refusal(self, scope: Scope, headers: dict[bytes, bytes]) -> Response | None:
        who = self._who(headers)
        if not self._buckets.take(f"token {who.token}" if isinstance(who, Who) else address_of(scope)):
            text = f"more than {self._buckets.rate_per_s:.0f} requests per second"
            return answer(429, "busy", text, "wait a moment")
        host = headers.get(b"host", b"").decode("latin-1")
        if not self._hosts.allows(host):
            hint = "use its address, or start the server with --allow-host NAME"
            return answer(421, "wrong_host", f"this server does not go by the name {host[:100]!r}", hint)
        if scope["path"].startswith(self._prefix):
            if isinstance(who, Unauthorized):
                return answer(who.status, who.code, str(who), who.hint)
            if (place := place_of(scope)) is not None:
                place.proved(who.user)
        length = headers.get(b"content-length", b"")
        most = self._most_bytes(scope)
        if length.isdigit() and int(length) > most:
            return answer(413, "too_large", too_large(most), "put large things into files")
        return None

    def _who(self, headers: dict[bytes, bytes]) -> Who | Unauthorized:
        try:
            return self._gate.who(headers.get(b"authorization", b"").decode("latin-1"))
        except Unauthorized as error:
            return error

    def _most_bytes(self, scope: Scope) -> int:
        """Only working directories may be large. Their route checks who sends them before it reads any of it."""
        is_upload = scope["method"] == "PUT" and scope["path"].startswith(f"{self._prefix}/workdirs/")
        return self._upload_bytes if is_upload else MAX_BODY_BYTES

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send) -> None:
        seen, most = 0, self._most_bytes(scope)

        async def counting() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > most:
                # the only exception that FastAPI does not wrap here
                raise HTTPException(413, too_large(most))
            return message

        async def noting(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._answered(message["status"])
            await send(message)

        await self.app(scope, counting, noting)
