"""Sizes below its maximum to which the server holds a job for a while: it is idle, or its new workers fail.

The smallest holds. A job with an autoscaler is left to it.
"""

from __future__ import annotations

from collections.abc import Callable

from shoal.core.events import Capped
from shoal.server.loop.live_job import LiveJob

IDLE, LOSSES = "idle", "losses"


class Caps:
    """Writes `LiveJob.caps`. Nobody else does."""

    def __init__(self, take_in: Callable[[Capped], None]) -> None:
        self._take_in = take_in

    def put(self, job: LiveJob, cause: str, gpus: int, why: str) -> None:
        if not job.spec.get("autoscale"):
            job.caps[cause] = (gpus, why)
            self._tell(job)

    def drop(self, job: LiveJob, cause: str) -> None:
        if job.caps.pop(cause, None) is not None:
            self._tell(job)

    def _tell(self, job: LiveJob) -> None:
        gpus, why = min(job.caps.values(), default=(None, ""))
        self._take_in(Capped(job.id, gpus, why))
