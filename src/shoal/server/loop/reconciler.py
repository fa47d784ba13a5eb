"""Reconciles the jobs that changed: moves each towards its target, then writes and carries out the changes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Set
from typing import Protocol

from shoal.server.api.models import Resize
from shoal.server.loop.live_job import LiveJob
from shoal.server.loop.outbox import Outbox
from shoal.server.loop.runner import Runner
from shoal.server.loop.sharing.sharing import Sharing

log = logging.getLogger("shoal.server")

#: How long after a failed transaction it is tried again.
RETRY_S = 1.0


class ReconcilerLoop(Protocol):
    """What the reconciler needs of the control loop."""

    @property
    def ready(self) -> bool: ...

    @property
    def stopping(self) -> bool: ...

    @property
    def sharing(self) -> Sharing: ...

    @property
    def runners(self) -> Mapping[Resize, Runner]: ...

    @property
    def now_s(self) -> Callable[[], float]: ...


class Reconciler:
    def __init__(
        self, loop: ReconcilerLoop, jobs: Mapping[int, LiveJob], unmet: Set[int], outbox: Outbox
    ) -> None:
        """`unmet`: the jobs that wait for GPUs which others have not released yet."""
        self._loop, self._jobs, self._unmet, self._outbox = loop, jobs, unmet, outbox
        self._changed: set[int] = set()
        self._settle_at: asyncio.Handle | None = None
        self._retry: asyncio.TimerHandle | None = None

    def __bool__(self) -> bool:
        """Whether a job is to be reconciled."""
        return bool(self._changed) or self._settle_at is not None

    def soon(self, job: LiveJob) -> None:
        """Reconcile this job when the present turn of the event loop is over."""
        self._changed.add(job.id)
        self.settle_soon()

    def settle_soon(self) -> None:
        if self._settle_at is None:
            self._settle_at = asyncio.get_running_loop().call_soon(self.settle)

    def reconcile_next(self, *job_ids: int) -> None:
        """Reconcile these jobs at the next `settle`."""
        self._changed.update(job_ids)

    def gpus_freed(self) -> None:
        """Reconcile the jobs that wait for GPUs."""
        for job_id in self._unmet:
            if job_id in self._jobs:
                self.soon(self._jobs[job_id])

    def settle(self) -> None:
        """Move every job that changed towards its target, jobs that release GPUs first."""
        if self._settle_at is not None:
            self._settle_at.cancel()
            self._settle_at = None
        if not self._loop.ready:
            return
        self._reconcile()
        if self._loop.sharing.stale and not self._loop.stopping:
            self._loop.sharing.decide(self._loop.now_s())
            self._reconcile()
        self.flush()

    def _reconcile(self) -> None:
        changed, self._changed = self._changed, set()
        jobs = [self._jobs[i] for i in sorted(changed) if i in self._jobs and not self._jobs[i].is_over]
        if not self._loop.stopping:
            for job in sorted(jobs, key=lambda j: j.target_gpus >= j.gpus and not j.is_to_leave):
                try:
                    self._loop.runners[job.resize].reconcile(job)
                except Exception:  # it is tried again when the job changes again; the others go on
                    log.exception("job %d could not be moved towards its target", job.id)

    def flush(self) -> None:
        """Write the changes and carry them out; if that fails, try again later."""
        if not self._outbox.flush() and self._retry is None:
            self._retry = asyncio.get_running_loop().call_later(RETRY_S, self._flush_again)

    def _flush_again(self) -> None:
        self._retry = None
        self.flush()

    def close(self) -> None:
        for handle in (self._settle_at, self._retry):
            if handle is not None:
                handle.cancel()
