"""Restarts: how often a job may start again, and how long it rests before, so that a crash loop ends.

While a job rests it is held back from the scheduler, so that its GPUs serve others. The rests of failures in a row
double, up to minutes, and differ from job to job. The one place that lets a job rest and start again.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping
from enum import Enum

from shoal.core.events import Held
from shoal.server.api.models import JobState, Resize
from shoal.server.loop.live_job import LiveJob
from shoal.server.loop.outbox import Outbox

#: The rest after a first failure, and the longest.
FIRST_S, LONGEST_S = 1.0, 300.0
#: A failure after so long is not the next one of a loop: rests begin anew.
LONG_RUN_S = 600.0
LOST_RESTARTS = 3
"""How often a job that lost all its workers restarts from its last checkpoint, unless its owner sets a limit."""
MAX_UNBEGUN = 10
"""Starts in a row that may fail before the command runs."""
#: A job that restarts to change its size has so long to make progress before it restarts to grow.
RESIZE_REST_S = 30.0


class Cause(Enum):
    """Why a job needs to start again."""

    FAILED = "failed"  #: a worker failed by itself
    LOST = "lost"  #: all workers were lost
    UNBEGUN = (
        "unbegun"  #: a worker could not be started: nothing of the job has run, so this is not a restart
    )


class Restarts:
    def __init__(
        self,
        jobs: Mapping[int, LiveJob],
        outbox: Outbox,
        take_in: Callable[[Held], None],
        soon: Callable[[LiveJob], None],
        now_s: Callable[[], float],
    ) -> None:
        """`soon` reconciles a job: if no decision fell into its rest, it keeps its target."""
        self._jobs, self._outbox, self._now_s = jobs, outbox, now_s
        self._take_in, self._soon = take_in, soon
        self._timers: dict[int, asyncio.TimerHandle] = {}

    def rest(self, job: LiveJob) -> float:
        """Free its GPUs and start it again later. Returns the seconds until then."""
        now_s = self._now_s()
        job.failures = next_failures(job, now_s)
        delay_s = rest_s(job.id, job.failures)
        job.again_s, job.refused = now_s + delay_s, 0
        self._outbox.job(job)
        self._take_in(Held(job.id, True))
        self._arm(job, delay_s)
        return delay_s

    def open(self) -> None:
        """The server starts: the rests of the last server go on."""
        for job in self._jobs.values():
            if job.again_s is not None:
                self._arm(job, min(max(job.again_s - self._now_s(), 0.0), LONGEST_S))

    def end_rest(self, job: LiveJob) -> None:
        """Start it again now. A job that its owner holds stays held."""
        timer = self._timers.pop(job.id, None)
        if timer is not None:
            timer.cancel()
        if job.again_s is None:
            return
        job.again_s = None
        self._outbox.job(job)
        if job.life.state is not JobState.PAUSED:
            self._take_in(Held(job.id, False))
            self._soon(job)

    def close(self) -> None:
        for timer in self._timers.values():
            timer.cancel()

    def _arm(self, job: LiveJob, delay_s: float) -> None:
        self._timers[job.id] = asyncio.get_running_loop().call_later(delay_s, self._elapsed, job.id)

    def _elapsed(self, job_id: int) -> None:
        self._timers.pop(job_id, None)
        job = self._jobs.get(job_id)
        if job is not None and not job.is_over:
            self.end_rest(job)


def may_restart(job: LiveJob, cause: Cause) -> bool:
    """Whether it may start again. `max_restarts` of its owner counts restarts of every kind."""
    if cause is Cause.UNBEGUN:
        return job.failures < MAX_UNBEGUN
    given = cause is Cause.FAILED or "max_restarts" in job.given
    return bool(job.life.restarts < (job.spec["max_restarts"] if given else LOST_RESTARTS))


def next_failures(job: LiveJob, now_s: float) -> int:
    """Failures in a row, with the one that has just happened."""
    lasted_s = 0.0 if job.began_s is None else now_s - job.began_s
    return 1 if lasted_s > LONG_RUN_S else job.failures + 1


def rest_s(job_id: int, failures: int) -> float:
    """How long it rests after so many failures in a row: up to half of it is cut, by chance."""
    full_s = min(FIRST_S * 2.0 ** min(failures - 1, 30), LONGEST_S)
    return full_s * random.Random(f"{job_id} {failures}").uniform(0.5, 1.0)


def rests_until_s(job: LiveJob, want: Mapping[int, int], now_s: float) -> float | None:
    """Until when a running job does not restart to grow; None if it need not wait.

    It leaves GPUs that others were given at once.
    """
    if job.resize is not Resize.RESTART or job.began_s is None or not job.workers:
        return None
    have: dict[int, int] = {}
    for worker in job.workers.values():
        have[worker.device[0]] = have.get(worker.device[0], 0) + len(worker.devices)
    grows = all(want.get(node, 0) >= gpus for node, gpus in have.items()) and dict(want) != have
    until_s = job.began_s + RESIZE_REST_S
    return until_s if grows and now_s < until_s else None
