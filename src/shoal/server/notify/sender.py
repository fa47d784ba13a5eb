"""Send one notification: to an address that was checked, within a bounded time, without following redirects."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
from collections.abc import Iterable
from typing import Any
from urllib.parse import urlsplit

import httpcore

from shoal import __version__
from shoal.core.errors import ShoalError
from shoal.server.notify.address import Allowed, resolve

#: The longest that one attempt may take, from the lookup of the name to the status of the answer.
ATTEMPT_S = 10.0
#: Attempts of one user at the same time. So receivers that hang delay only those of the same user.
MOST_AT_ONCE = 4


class NotSent(ShoalError):
    """The notification did not arrive."""


class _Checked(httpcore.AnyIOBackend):
    """Connects only to addresses that were checked at this moment, so that a name cannot change in between."""

    def __init__(self, allowed: Allowed) -> None:
        super().__init__()
        self._allowed = allowed

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        address = await resolve(host, port, self._allowed)
        return await super().connect_tcp(address, port, timeout, local_address, socket_options)


class Sender:
    def __init__(self, allowed: Allowed) -> None:
        self.allowed = allowed
        # Without a limit of all connections: a connection that one user waits for could be held by another.
        self._pool = httpcore.AsyncConnectionPool(
            network_backend=_Checked(allowed), max_keepalive_connections=20, keepalive_expiry=5.0
        )
        self._turns: dict[str, asyncio.Semaphore] = {}

    async def send(
        self, url: str, secret: str, body: dict[str, Any], *, user: str, delivery: str, now_s: float
    ) -> None:
        """Raises NotSent or Refused with one line if the receiver did not accept it.

        `user`: whose webhook it is. The time of an attempt does not include the wait for other attempts of this user.
        """
        async with self._turns.setdefault(user, asyncio.Semaphore(MOST_AT_ONCE)):
            await self._send(url, secret, body, delivery=delivery, now_s=now_s)

    async def _send(
        self, url: str, secret: str, body: dict[str, Any], *, delivery: str, now_s: float
    ) -> None:
        content = json.dumps(body, separators=(",", ":")).encode()
        headers = [
            ("Host", urlsplit(url).netloc),
            ("Content-Type", "application/json"),
            ("User-Agent", f"shoal/{__version__}"),
            ("X-Shoal-Delivery", delivery),
            ("X-Shoal-Timestamp", f"{now_s:.0f}"),
            ("X-Shoal-Signature", f"sha256={signature(secret, f'{now_s:.0f}', content)}"),
        ]
        try:
            status = await asyncio.wait_for(self._post(url, headers, content), ATTEMPT_S)
        except TimeoutError:
            raise NotSent(f"it did not answer within {ATTEMPT_S:g} s") from None
        except (httpcore.NetworkError, httpcore.ProtocolError, httpcore.TimeoutException, OSError) as error:
            raise NotSent(f"it cannot be reached: {str(error) or type(error).__name__}"[:300]) from None
        if 300 <= status < 400:
            raise NotSent(f"it answered {status}, a redirect, which is not followed")
        if not 200 <= status < 300:
            raise NotSent(f"it answered {status}")

    async def _post(self, url: str, headers: list[tuple[str, str]], content: bytes) -> int:
        """The status of the answer. Its body is not read."""
        async with self._pool.stream("POST", url, headers=headers, content=content) as answer:
            return int(answer.status)

    async def close(self) -> None:
        await self._pool.aclose()


def signature(secret: str, timestamp: str, content: bytes) -> str:
    """HMAC-SHA256 over `timestamp.body`, in hexadecimal digits."""
    return hmac.new(secret.encode(), timestamp.encode() + b"." + content, hashlib.sha256).hexdigest()
