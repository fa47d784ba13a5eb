"""Join tokens: the short-lived secrets that agents join with.

A token is `shoal-join:FINGERPRINT:SECRET`. FINGERPRINT is the SHA-256 of the control plane's certificate: the agent
talks to no other server. The control plane stores the hash of the secret only. The agent sends the secret itself inside
TLS, after a handshake with its hash, so somebody who reads the stored hashes cannot join with them.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from dataclasses import dataclass

import msgspec

PREFIX = "shoal-join"
SECRET_BYTES = 24
DEFAULT_LIFETIME_S = 3600.0


class TokenError(ValueError):
    """A token is malformed, wrong, used or expired."""


@dataclass(frozen=True, slots=True)
class JoinToken:
    """A token as the agent has it."""

    fingerprint: str
    secret: str

    def __str__(self) -> str:
        return f"{PREFIX}:{self.fingerprint}:{self.secret}"

    def __repr__(self) -> str:
        return f"JoinToken({token_id(self.secret)})"

    @staticmethod
    def parse(text: str) -> JoinToken:
        found = re.fullmatch(rf"{PREFIX}:([0-9a-f]{{64}}):([0-9a-f]{{{2 * SECRET_BYTES}}})", text.strip())
        if found is None:
            raise TokenError(
                f"this is not a join token of the form {PREFIX}:FINGERPRINT:SECRET; "
                "`shoal node join-token create` makes one"
            )
        return JoinToken(found[1], found[2])


class StoredToken(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A token as the control plane keeps it, without its secret."""

    id: str
    secret_hash: str
    expires_s: float  # wall clock
    used_by: str | None = None  # the agent that has joined with it


def new_secret() -> str:
    return secrets.token_hex(SECRET_BYTES)


def hash_secret(secret: str) -> str:
    # A plain hash is enough: the secret is random and cannot be guessed.
    return hashlib.sha256(secret.encode()).hexdigest()


def token_id(secret: str) -> str:
    """A short name of the token. It tells nothing about the secret."""
    return hashlib.sha256(b"id:" + secret.encode()).hexdigest()[:12]


def new_token(
    fingerprint: str, now_s: float, lifetime_s: float = DEFAULT_LIFETIME_S
) -> tuple[JoinToken, StoredToken]:
    secret = new_secret()
    return JoinToken(fingerprint, secret), StoredToken(
        token_id(secret), hash_secret(secret), now_s + lifetime_s
    )


def check_token(stored: StoredToken | None, secret: str, agent: str, now_s: float) -> None:
    """Raise TokenError with the reason if the agent may not join with this secret.

    The agent that used the token may use it again until it expires: its first connection may have broken before it
    received its own secret.
    """
    if stored is None or not hmac.compare_digest(stored.secret_hash, hash_secret(secret)):
        raise TokenError("the join token is not known; it may have been removed")
    if now_s >= stored.expires_s:
        raise TokenError("the join token has expired: `shoal node join-token create` makes a new one")
    if stored.used_by not in (None, agent):
        raise TokenError(f"the join token was used by the agent {stored.used_by}: create one for each agent")
