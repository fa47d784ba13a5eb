"""Stop all workers before the server ends."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from shoal.executors.base import Executor
from shoal.server.api.models import Resize
from shoal.server.loop.live_job import LiveJob
from shoal.server.loop.outbox import Outbox
from shoal.server.loop.runner import Runner

log = logging.getLogger("shoal.server")

#: Workers that have not ended this long after their grace period are killed.
MARGIN_S = 30.0
KILL_AGAIN_S = 10.0


async def stop_jobs(
    jobs: Mapping[int, LiveJob], runners: Mapping[Resize, Runner], executor: Executor, outbox: Outbox
) -> None:
    """Release every GPU: live jobs save their state, others are stopped. Returns when all workers have ended."""
    for job in list(jobs.values()):
        try:
            runners[job.resize].shut_down(job)
        except Exception:  # the others still save their state
            log.exception("job %d could not be shut down in order", job.id)
            for worker in job.workers.values():
                executor.stop(worker.id)
    outbox.flush()
    longest_s = max((j.spec["grace_s"] for j in jobs.values() if j.workers), default=0.0)
    deadline = asyncio.get_running_loop().time() + longest_s + MARGIN_S
    while any(j.workers for j in jobs.values()):
        if asyncio.get_running_loop().time() > deadline:
            for job in jobs.values():
                for worker in job.workers.values():
                    executor.stop(worker.id, kill=True)
            deadline += KILL_AGAIN_S
        await asyncio.sleep(0.05)
    outbox.flush()
