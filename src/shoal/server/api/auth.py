"""Who may do what. Tokens are kept as hashes. A refusal does not reveal which users or tokens exist."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

from shoal.server.api.models import Role
from shoal.server.services.errors import Forbidden, NotFound, Unauthorized
from shoal.server.services.naming import hash_of
from shoal.server.store.change import Row
from shoal.server.store.store import Store, StoreFull

MOST_CACHED = 1000
TOUCH_S = 60.0


@dataclass(frozen=True, slots=True)
class Who:
    """The user who asks."""

    user: str
    role: Role
    token: int
    #: When the token expires.
    expires_s: float | None = None

    @property
    def sees_all(self) -> bool:
        return self.role is not Role.USER

    @property
    def only(self) -> str | None:
        """The user whose jobs this user may see; None for all."""
        return None if self.sees_all else self.user

    def must_change(self, owner: str | None = None) -> None:
        """Raise unless this user may make changes, and to jobs of `owner`."""
        if self.role is Role.VIEWER:
            raise Forbidden("your role is viewer: you may look, but not change anything")
        if owner is not None and self.role is not Role.ADMIN and owner != self.user:
            raise NotFound("there is no such job")

    def must_administer(self) -> None:
        if self.role is not Role.ADMIN:
            raise Forbidden("only an admin may do this")


class Gate:
    """Finds out who asks."""

    def __init__(self, store: Store, now_s: Callable[[], float]) -> None:
        self._store, self._now_s = store, now_s
        self._known: dict[str, Row] = {}
        #: Hashes of all tokens: an unknown token is refused without a query.
        self._hashes: set[str] | None = None

    def forget(self) -> None:
        """Tokens or roles have changed."""
        self._known.clear()
        self._hashes = None

    def who(self, authorization: str) -> Who:
        """The user of an `Authorization` header."""
        scheme, _, token = authorization.partition(" ")
        if scheme.lower() != "bearer" or not token or len(token) > 200:
            raise Unauthorized
        hashed = hash_of(token.strip())
        row = self._known.get(hashed) or self._read(hashed)
        now_s = self._now_s()
        if row["expires_s"] is not None and now_s >= row["expires_s"]:
            raise Unauthorized
        self._touch(row, now_s)
        return Who(row["user"], Role(row["role"]), row["id"], row["expires_s"])

    def _read(self, hashed: str) -> Row:
        if self._hashes is None:
            self._hashes = {row["hash"] for row in self._store.tokens()}
        row = self._store.token_of_hash(hashed) if hashed in self._hashes else None
        if row is None:
            raise Unauthorized
        if len(self._known) >= MOST_CACHED:
            self._known.clear()
        self._known[hashed] = row
        return row

    def is_valid(self, who: Who) -> bool:
        """Whether the token and the role of an open stream are still what they were."""
        row = self._store.token(who.token)
        expires_s = None if row is None else row["expires_s"]
        return (
            row is not None
            and (expires_s is None or self._now_s() < expires_s)
            and (row["user"], row["role"]) == (who.user, who.role.value)
        )

    def _touch(self, row: Row, now_s: float) -> None:
        if row["last_used_s"] is None or now_s - row["last_used_s"] > TOUCH_S:
            row["last_used_s"] = now_s
            # On a full disk, requests that only read are still answered.
            with contextlib.suppress(StoreFull), self._store.change(now_s) as change:
                change.update_token(row["id"], last_used_s=now_s)
