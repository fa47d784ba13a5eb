"""Saves every few seconds what may be slightly old after a crash: the ledger and the progress of live jobs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

from shoal.core.errors import ShoalError
from shoal.server.api.models import Resize
from shoal.server.loop.live_job import LiveJob
from shoal.server.loop.live_ledger import LiveLedger
from shoal.server.store.store import Store

log = logging.getLogger("shoal.server")

SAVE_S = 5.0


class Saver:
    def __init__(
        self, store: Store, ledger: LiveLedger, jobs: Mapping[int, LiveJob], now_s: Callable[[], float]
    ) -> None:
        self._store, self._ledger, self._jobs, self._now_s = store, ledger, jobs, now_s
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._save_regularly())

    async def _save_regularly(self) -> None:
        while True:
            await asyncio.sleep(SAVE_S)
            self.save()

    def save(self) -> None:
        now_s = self._now_s()
        try:
            with self._store.change(now_s) as change:
                change.put("ledger", self._ledger.state(now_s))
                for job in self._jobs.values():
                    if job.resize is Resize.LIVE:
                        progress = job.row()["progress"]
                        change.update_job(job.id, progress=progress, stalled_s=job.stalled_s)
        except ShoalError as error:
            log.error("cannot save: %s", error)

    def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
