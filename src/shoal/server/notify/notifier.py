"""Sends notifications: one task per webhook, in the order of the events, again with back-off if one does not arrive.

The events in the store are the queue, and the row of the webhook says which one is next. So nothing is lost when the
server ends, and nothing else waits for a receiver that hangs.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable

from shoal.core.errors import ShoalError
from shoal.server.api.hub import Hub
from shoal.server.notify.address import Refused
from shoal.server.notify.message import message, types_of
from shoal.server.notify.sender import NotSent, Sender
from shoal.server.store import tables as t
from shoal.server.store.change import Row
from shoal.server.store.store import Store

log = logging.getLogger("shoal.server")

#: Attempts to send one notification, and the rests between them: they double from the first to the longest.
MAX_ATTEMPTS, FIRST_S, LONGEST_S = 8, 1.0, 300.0
#: A notification about an older event is dropped.
MAX_AGE_S = 24 * 3600.0
WAIT_S = 60.0


class Notifier:
    def __init__(
        self, store: Store, hub: Hub, sender: Sender, now_s: Callable[[], float], first_s: float = FIRST_S
    ) -> None:
        self._store, self._hub, self._sender, self._now_s = store, hub, sender, now_s
        self._first_s = first_s
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._closed = False
        self._random = random.Random(0)

    def start(self) -> None:
        for row in self._store.rows_of(t.webhooks):
            self.watch(row["id"])

    def watch(self, webhook: int) -> None:
        """Send the notifications of this webhook from now on."""
        self._tasks[webhook] = asyncio.create_task(self._run(webhook))

    def forget(self, webhook: int) -> None:
        task = self._tasks.pop(webhook, None)
        if task is not None:
            task.cancel()

    async def close(self) -> None:
        self._closed = True
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._sender.close()

    async def _run(self, webhook: int) -> None:
        seen = 0
        while not self._closed:  # `wait_for` may lose a cancellation
            try:
                row = self._find(webhook)
                if row is None:
                    return
                newest = self._hub.last_id
                event = self._store.next_event(row["user"], types_of(row["events"]), max(row["cursor"], seen))
                if event is None:
                    seen = newest
                    if self._hub.last_id == newest:
                        await self._hub.wait(WAIT_S)
                else:
                    await self._deliver(row, event)
            except ShoalError as error:  # the store cannot be used now
                log.warning("webhook %s waits: %s", webhook, error)
                await asyncio.sleep(self._first_s)

    def _find(self, webhook: int) -> Row | None:
        rows = self._store.rows_of(t.webhooks, t.webhooks.c.id == webhook)
        return rows[0] if rows else None

    async def _deliver(self, row: Row, event: Row) -> None:
        """Make the next attempt when it is due, and record how it went."""
        now_s = self._now_s()
        if row["next_s"] is not None and row["next_s"] > now_s:
            await asyncio.sleep(row["next_s"] - now_s)
        error = None
        if self._now_s() - event["at_s"] > MAX_AGE_S:
            error = "it was older than a day"
        else:
            try:
                await self._send(row, event)
            except (NotSent, Refused) as why:
                error = str(why)
        self._record(row, event, error)

    async def _send(self, row: Row, event: Row) -> None:
        job = self._store.job(event["job"]) if event["job"] is not None else None
        body = message(row["format"], event, job["name"] if job else None)
        delivery = f"{row['id']}-{event['id']}"
        await self._sender.send(
            row["url"], row["secret"], body, user=row["user"], delivery=delivery, now_s=self._now_s()
        )

    def _record(self, row: Row, event: Row, error: str | None) -> None:
        attempts = row["attempts"] + 1
        now_s = self._now_s()
        if error is None:
            values = {"cursor": event["id"], "attempts": 0, "next_s": None, "sent": row["sent"] + 1}
            values["last_error"] = None
        elif attempts >= MAX_ATTEMPTS or now_s - event["at_s"] > MAX_AGE_S:
            values = {"cursor": event["id"], "attempts": 0, "next_s": None, "dropped": row["dropped"] + 1}
            values["last_error"] = f"event {event['id']} was dropped after {attempts} attempts: {error}"
        else:
            rest_s = min(self._first_s * 2 ** (attempts - 1), LONGEST_S) * self._random.uniform(0.8, 1.2)
            values = {"attempts": attempts, "next_s": now_s + rest_s, "last_error": error}
        with self._store.change(now_s) as change:
            change.update(t.webhooks, row["id"], **values)
