"""How an agent on another machine reaches its control plane: with a join token first, then with its own secret."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from pathlib import Path

from shoal import __version__
from shoal.agents.agent import AgentError
from shoal.agents.join_tokens import JoinToken, hash_secret, token_id
from shoal.agents.link import AGENT, CONNECT_TIMEOUT_S, JOIN, Link, StreamLink
from shoal.wire.atomic_file import write_atomically
from shoal.wire.auth import AuthError, OtherProtocol
from shoal.wire.channel import parse_address


class Membership:
    """The secret that an agent has at the moment, in `STATE/credential`, and the connection that it opens with it.

    An agent whose secret the control plane does not know any more joins again if there is a token that it knows.
    """

    def __init__(
        self,
        state_directory: Path,
        name: str,
        address: str,
        token: JoinToken,
        token_file: Path | None = None,
    ) -> None:
        """`token_file` is read again when the secret is not known any more: it may have a new token by then."""
        self._file = state_directory / "credential"
        self._name, self._address, self._token, self._token_file = name, address, token, token_file
        self._own = self._file.read_text().strip() if self._file.exists() else ""

    async def connect(self) -> Link:
        try:
            if self._own:
                return await self._dial(self._own, self._name, AGENT)
            return await self._join(self._token.secret)
        except ssl.SSLError:
            if not await _speaks_http(self._address):
                raise
            raise AgentError(
                f"--join: {self._address} speaks HTTP, so it is the port of the API, or another program: agents have a "
                "port of their own, and `shoal node add HOST` prints the command with it"
            ) from None
        except OtherProtocol as error:
            raise AgentError(
                f"the control plane at {self._address} has another version of Shoal than this machine "
                f"({__version__}): {error}; install the same version here, which `shoal version` shows on the server. "
                "`shoal node ls` lists agents that are refused"
            ) from None
        except AuthError as error:
            if not self._own:
                raise AgentError(
                    f"the control plane at {self._address} does not know this join token, it may have expired or been "
                    "removed: `shoal node join-token create` makes a new one"
                ) from None
            return await self._join_again(error)

    async def _join_again(self, error: AuthError) -> Link:
        """`error`: the control plane does not know this agent, which was removed."""
        try:
            return await self._join(self._newest_token())
        except AuthError:
            where = f"write it to {self._token_file}" if self._token_file else "start it with --token-file"
            raise AuthError(
                f"the control plane does not know this agent any more ({error}): it was removed with "
                f"`shoal node rm`. To join again it needs a new token of `shoal node join-token create`: {where}"
            ) from None

    def _newest_token(self) -> str:
        with contextlib.suppress(OSError, ValueError):
            if self._token_file is not None:
                found = JoinToken.parse(self._token_file.read_text())
                if found.fingerprint == self._token.fingerprint:
                    return found.secret
        return self._token.secret

    async def _join(self, secret: str) -> Link:
        if not secret:
            raise AuthError("there is no join token")
        return await self._dial(secret, token_id(secret), JOIN)

    async def _dial(self, secret: str, job: str, purpose: str) -> Link:
        key = bytes.fromhex(hash_secret(secret))
        link = await StreamLink.dial(self._address, key, job, purpose, self._token.fingerprint)
        link.credential = secret
        return link

    def save(self, credential: str) -> None:
        write_atomically(self._file, credential)
        self._own = credential


async def _speaks_http(address: str) -> bool:
    """Whether whatever listens there answers as a web server does."""
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(*parse_address(address))
            try:
                writer.write(b"GET /healthz HTTP/1.0\r\n\r\n")
                return await reader.readexactly(5) == b"HTTP/"
            finally:
                writer.close()
    except (OSError, EOFError, TimeoutError):
        return False
