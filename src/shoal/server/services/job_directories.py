"""The directories of jobs that run under accounts (SHOAL_JOB_DIR): deleted some time after the job has ended."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import Callable
from pathlib import Path

from shoal.executors.accounts import job_directories
from shoal.server.store.store import Store

KEEP_S, TIDY_S = 86400.0, 3600.0


class JobDirectories:
    def __init__(self, store: Store, workers: Path, now_s: Callable[[], float]) -> None:
        """`workers`: where the agent in this process has its workers."""
        self._store, self._workers, self._now_s = store, workers, now_s

    async def tidy(self) -> None:
        over = [path for path in job_directories(self._workers) if not self._is_kept(path.name)]
        for path in over:
            await asyncio.to_thread(shutil.rmtree, path, ignore_errors=True)

    def _is_kept(self, job: str) -> bool:
        row = self._store.job(int(job)) if job.isdigit() else None
        if row is None:
            return False
        return row["finished_s"] is None or self._now_s() - row["finished_s"] < KEEP_S

    async def tidy_forever(self) -> None:
        while True:
            with contextlib.suppress(OSError):
                await self.tidy()
            await asyncio.sleep(TIDY_S)
