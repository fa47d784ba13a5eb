"""Tokens of the API. The store keeps their hashes only."""

from __future__ import annotations

import secrets
from collections.abc import Callable

from shoal.server.services.naming import hash_of
from shoal.server.store.change import Row
from shoal.server.store.store import Store


class Tokens:
    def __init__(self, store: Store, now_s: Callable[[], float]) -> None:
        self._store, self._now_s = store, now_s

    def of(self, user: str | None) -> list[Row]:
        """The tokens of one user; None: of all."""
        return self._store.tokens(user)

    def add(
        self, user: str, label: str, expires_in_s: float | None, actor: str, latest_s: float | None = None
    ) -> tuple[Row, str]:
        """(its row, the token itself). The token is shown this once. It expires at `latest_s` at the latest."""
        token = f"shoal_{secrets.token_urlsafe(32)}"
        now_s = self._now_s()
        ends_s = [latest_s, None if expires_in_s is None else now_s + expires_in_s]
        expires_s = min((end_s for end_s in ends_s if end_s is not None), default=None)
        with self._store.change(now_s, actor=actor) as change:
            token_id = change.add_token(user, hash_of(token), label, expires_s)
            change.event("token.created", f"token {token_id} for {user}", data={"token": token_id})
        return next(row for row in self._store.tokens(user) if row["id"] == token_id), token

    def delete(self, token_id: int, actor: str) -> None:
        with self._store.change(self._now_s(), actor=actor) as change:
            change.delete_token(token_id)
            change.event("token.deleted", f"token {token_id} is no longer valid", data={"token": token_id})
