"""How an agent on another machine reaches its control plane: with a join token first, then with its own secret."""

from __future__ import annotations

import os
from pathlib import Path

from shoal.agents.agent import AgentError
from shoal.agents.join_tokens import JoinToken, hash_secret, token_id
from shoal.agents.link import AGENT, JOIN, Link, StreamLink
from shoal.wire.auth import AuthError


class Membership:
    """The secret that an agent has at the moment, in `STATE/credential`, and the connection that it opens with it."""

    def __init__(self, state_directory: Path, name: str, address: str, token: JoinToken) -> None:
        self._file = state_directory / "credential"
        self._name, self._address, self._token = name, address, token
        self._own = self._file.read_text().strip() if self._file.exists() else ""

    @property
    def credential(self) -> str:
        return self._own or self._token.secret

    async def connect(self) -> Link:
        secret = bytes.fromhex(hash_secret(self.credential))
        if self._own:
            return await StreamLink.dial(self._address, secret, self._name, AGENT, self._token.fingerprint)
        job = token_id(self._token.secret)
        try:
            return await StreamLink.dial(self._address, secret, job, JOIN, self._token.fingerprint)
        except AuthError as error:
            if "protocol" in str(error):
                raise AgentError(f"{error}: install the same version of Shoal on both machines") from None
            raise AgentError(
                f"the control plane at {self._address} does not know this join token, it may have expired or been "
                "removed: `shoal node join-token create` makes a new one"
            ) from None

    def save(self, credential: str) -> None:
        temporary = self._file.with_suffix(".new")
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(credential)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self._file)
        self._own = credential
