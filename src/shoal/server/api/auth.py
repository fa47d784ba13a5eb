"""Who may do what. Tokens are kept as hashes; an answer never tells which user or token exists."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

from fastapi import Request

from shoal.server.api.errors import Forbidden, NotFound, Unauthorized
from shoal.server.api.models import Role
from shoal.server.home import Home, write_atomically
from shoal.server.services.naming import hash_of
from shoal.server.services.verbs import Verbs
from shoal.server.store.store import Store, StoreFull

ADMIN = "admin"
MOST_CACHED = 1000
TOUCH_S = 60.0


@dataclass(frozen=True, slots=True)
class Who:
    """The one who asks."""

    user: str
    role: Role
    token: int

    @property
    def sees_all(self) -> bool:
        return self.role is not Role.USER

    @property
    def only(self) -> str | None:
        """The user whose things this one may see; None for all."""
        return None if self.sees_all else self.user

    def must_change(self, owner: str | None = None) -> None:
        """Raise unless this one may change things, and those of `owner`."""
        if self.role is Role.VIEWER:
            raise Forbidden("your role is viewer: you may look, but not change anything")
        if owner is not None and self.role is not Role.ADMIN and owner != self.user:
            raise NotFound("there is no such job")

    def must_administer(self) -> None:
        if self.role is not Role.ADMIN:
            raise Forbidden("only an admin may do this")


class Gate:
    """Finds out who asks."""

    def __init__(self, store: Store, verbs: Verbs) -> None:
        self.store, self.verbs = store, verbs
        self._known: dict[str, dict[str, Any]] = {}

    def first_start(self, home: Home) -> None:
        """Make the admin and its token, if there is none yet; the token's file is for its owner only."""
        if self.store.user(ADMIN) is None:
            self.verbs.add_user(ADMIN, Role.ADMIN, 1.0, "system")
        if not home.admin_token.exists():
            _, token = self.verbs.add_token(ADMIN, "made at the first start", None, "system")
            write_atomically(home.admin_token, token + "\n")

    def forget(self) -> None:
        """Tokens or roles have changed."""
        self._known.clear()

    def who(self, request: Request) -> Who:
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not token or len(token) > 200:
            raise Unauthorized
        hashed = hash_of(token.strip())
        row = self._known.get(hashed)
        if row is None:
            row = self.store.token_of_hash(hashed)
            if row is None:
                raise Unauthorized
            if len(self._known) >= MOST_CACHED:
                self._known.clear()
            self._known[hashed] = row
        now_s = self.verbs.c.now_s()
        if row["expires_s"] is not None and now_s >= row["expires_s"]:
            raise Unauthorized
        self._touch(row, now_s)
        return Who(row["user"], Role(row["role"]), row["id"])

    def _touch(self, row: dict[str, Any], now_s: float) -> None:
        if row["last_used_s"] is None or now_s - row["last_used_s"] > TOUCH_S:
            row["last_used_s"] = now_s
            # A full disk is no reason not to answer who only wants to look.
            with contextlib.suppress(StoreFull), self.store.change(now_s) as change:
                change.update_token(row["id"], last_used_s=now_s)
