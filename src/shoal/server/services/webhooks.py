"""Webhooks: addresses that receive notifications of users' jobs."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from urllib.parse import urlsplit

from shoal.server.api import models as m
from shoal.server.loop.clock import as_time
from shoal.server.notify.address import Refused, check_url, resolve
from shoal.server.notify.message import message
from shoal.server.notify.notifier import Notifier
from shoal.server.notify.sender import NotSent, Sender
from shoal.server.services.errors import Conflict, Invalid, NotFound
from shoal.server.store import tables as t
from shoal.server.store.change import Row
from shoal.server.store.store import Store

MAX_WEBHOOKS_OF_USER = 10


class Webhooks:
    def __init__(self, store: Store, notifier: Notifier, sender: Sender, now_s: Callable[[], float]) -> None:
        self._store, self._notifier, self._sender, self._now_s = store, notifier, sender, now_s

    def of(self, only: str | None) -> list[m.Webhook]:
        """The webhooks of one user; None: all."""
        return [shown(row) for row in self._rows(only)]

    def _rows(self, only: str | None) -> list[Row]:
        return [row for row in self._store.rows_of(t.webhooks) if only in (None, row["user"])]

    async def add(self, new: m.WebhookCreate, user: str) -> m.WebhookCreated:
        if len(self._rows(user)) >= MAX_WEBHOOKS_OF_USER:
            raise Conflict(f"you have {MAX_WEBHOOKS_OF_USER} webhooks, which is the limit")
        try:
            host = check_url(new.url)
            await resolve(host, urlsplit(new.url).port or 443, self._sender.allowed)
        except Refused as error:
            raise Invalid(str(error), "url") from None
        secret = f"whsec_{secrets.token_urlsafe(32)}"
        values = {
            "user": user, "url": new.url, "format": new.format, "events": list(dict.fromkeys(new.events)),
            "secret": secret, "cursor": self._store.last_event()[0], "attempts": 0, "sent": 0, "dropped": 0,
        }  # fmt: skip
        with self._store.change(self._now_s(), actor=user) as change:
            webhook = change.insert(t.webhooks, **values)
            change.event("webhook.created", f"webhook {webhook} to {host}", user=user)
        assert webhook is not None
        self._notifier.watch(webhook)
        row = self._find(webhook, user)
        return m.WebhookCreated(**shown(row).model_dump(), secret=secret)

    def delete(self, webhook: int, only: str | None, actor: str) -> None:
        row = self._find(webhook, only)
        self._notifier.forget(webhook)
        with self._store.change(self._now_s(), actor=actor) as change:
            change.delete(t.webhooks, t.webhooks.c.id == webhook)
            change.event("webhook.deleted", f"webhook {webhook}", user=row["user"])

    async def test(self, webhook: int, only: str | None) -> m.WebhookTest:
        """Send a notification now, once."""
        row = self._find(webhook, only)
        now_s = self._now_s()
        event = {
            "id": 0, "at_s": now_s, "type": "webhook.test", "user": row["user"], "job": None,
            "message": "this is a test of the webhook",
        }  # fmt: skip
        body = message(row["format"], event, None)
        try:
            await self._sender.send(
                row["url"], row["secret"], body, user=row["user"], delivery=f"{webhook}-test", now_s=now_s
            )
        except (NotSent, Refused) as error:
            return m.WebhookTest(arrived=False, message=str(error))
        return m.WebhookTest(arrived=True, message="it was accepted")

    def _find(self, webhook: int, only: str | None) -> Row:
        row = next((row for row in self._rows(only) if row["id"] == webhook), None)
        if row is None:
            raise NotFound(f"there is no webhook {webhook}", "`shoal notify ls` lists them")
        return row


def shown(row: Row) -> m.Webhook:
    """Without its secret, and without the path of its URL, which is a secret of Slack."""
    parts = urlsplit(row["url"])
    return m.Webhook(
        id=row["id"],
        user=row["user"],
        url=f"{parts.scheme}://{parts.netloc}/...",
        format=row["format"],
        events=row["events"],
        created_at=as_time(row["created_s"]),
        sent=row["sent"],
        dropped=row["dropped"],
        failed_attempts=row["attempts"],
        next_attempt_at=as_time(row["next_s"]),
        last_error=row["last_error"],
    )
