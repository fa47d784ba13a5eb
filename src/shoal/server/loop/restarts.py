"""Restarts: how often a job may start again, and how long it rests before, so that a crash loop ends.

While a job rests it is held back from the scheduler, so that its GPUs serve others. The rests of failures in a row
double, up to minutes, and differ from job to job. The one place that lets a job rest and start again.

A live job that loses some of its workers goes on with the others, and new ones are added. If these are lost too, soon
after they joined, it rests before it adds more, and its unused GPUs serve others. A worker may be lost because its
machine failed. So this alone never ends a job that can go on with fewer workers and completes steps.

    what happens                                      life.restarts  failures  losses  vain_losses
    the whole job fails or loses all workers          +1             +1        0
    no worker of it could be started                                 +1        0
    a worker is lost before or soon after it joins                             +1      +1
    a worker is lost that had worked for STEADY_S                              1       +1
    it completes a step beyond its furthest                          0                 0
    an attempt lasted for LONG_RUN_S, then it fails   +1             1         0

`failures` and `losses` set the length of the next rest. `life.restarts` never falls; `max_restarts` limits it. Without
`max_restarts`, only restarts since the last new step count. Losses during a rest belong to the loss before it.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping
from enum import Enum

from shoal.core.events import Held
from shoal.core.words import counted
from shoal.server.api.models import JobState, Resize
from shoal.server.loop.caps import LOSSES, Caps
from shoal.server.loop.live_job import LiveJob
from shoal.server.loop.outbox import Outbox

#: The rest after a first failure, and the longest.
FIRST_S, LONGEST_S = 1.0, 300.0
#: A failure after so long is not the next one of a loop: rests begin anew.
LONG_RUN_S = 600.0
LOST_RESTARTS = 3
"""How often a job that lost its workers restarts without a new step in between, unless its owner sets a limit."""
#: A worker that is lost after it has worked for so long is not the next one of a loop.
STEADY_S = 30.0
MAX_LOSSES = 3
"""Losses in a row after which a job that cannot go on with fewer workers restarts as a whole."""
MAX_VAIN_LOSSES = 10
"""Losses without a new step in between after which every job restarts as a whole."""
MAX_UNBEGUN = 10
"""Starts in a row that may fail before the command runs."""
#: A job that restarts to change its size has so long to make progress before it restarts to grow.
RESIZE_REST_S = 30.0


class Cause(Enum):
    """Why a job needs to start again."""

    FAILED = "failed"  #: a worker failed by itself
    LOST = "lost"  #: all workers were lost, or new ones are lost again and again
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
        caps: Caps,
        elastic: Callable[[], bool],
    ) -> None:
        """`soon` reconciles a job: if no decision fell into its rest, it keeps its target.

        `elastic`: whether the policy in force gives jobs other sizes than they request.
        """
        self._jobs, self._outbox, self._now_s = jobs, outbox, now_s
        self._take_in, self._soon, self._caps, self._elastic = take_in, soon, caps, elastic
        self._timers: dict[int, asyncio.TimerHandle] = {}
        self._growth: dict[int, asyncio.TimerHandle] = {}

    def rest(self, job: LiveJob) -> float:
        """Free its GPUs and start it again later. Returns the seconds until then."""
        now_s = self._now_s()
        job.failures = next_failures(job, now_s)
        job.losses = 0
        delay_s = rest_s(job.id, job.failures)
        job.again_s = now_s + delay_s
        self._may_grow(job)
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
        self._may_grow(job)
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
        for timer in (*self._timers.values(), *self._growth.values()):
            timer.cancel()

    # -- lost workers ------------------------------------------------------------------------------

    def worker_lost(self, job: LiveJob, *, steady: bool, left: int) -> bool:
        """A live job lost a worker and `left` are left: new ones start at once, or after a rest.

        `steady`: it had worked for a while. False if the job as a whole must start again, or end.
        """
        if job.grows_s is not None or job.again_s is not None:
            return True
        job.losses = 1 if steady else job.losses + 1
        job.vain_losses += 1
        self._outbox.job(job)
        fewer = self._elastic() and left >= job.min_gpus
        if job.vain_losses >= MAX_VAIN_LOSSES or (job.losses >= MAX_LOSSES and not fewer):
            return False
        if job.losses > 1:
            self._rest_growth(job, left if fewer else None)
        return True

    def _rest_growth(self, job: LiveJob, most: int | None) -> None:
        """Add no workers for a while, and let others have the GPUs that it does not use: it keeps `most`."""
        delay_s = rest_s(job.id, job.losses - 1)
        job.grows_s = self._now_s() + delay_s
        lost = f"{counted(job.losses, 'worker')} in a row were lost soon after they started"
        self._outbox.event("worker.lost", f"{lost}; new ones are tried in {delay_s:.0f} s", job)
        if most is not None:
            self._caps.put(job, LOSSES, most, f"{lost}, so it goes on with fewer for now")
        timer = asyncio.get_running_loop().call_later(delay_s, self._growth_rested, job.id)
        self._growth[job.id] = timer

    def _growth_rested(self, job_id: int) -> None:
        job = self._jobs.get(job_id)
        if job is not None:
            self._may_grow(job)
            self._soon(job)

    def _may_grow(self, job: LiveJob) -> None:
        timer = self._growth.pop(job.id, None)
        if timer is not None:
            timer.cancel()
        job.grows_s = None
        self._caps.drop(job, LOSSES)

    def _arm(self, job: LiveJob, delay_s: float) -> None:
        self._timers[job.id] = asyncio.get_running_loop().call_later(delay_s, self._elapsed, job.id)

    def _elapsed(self, job_id: int) -> None:
        self._timers.pop(job_id, None)
        job = self._jobs.get(job_id)
        if job is not None and not job.is_over:
            self.end_rest(job)


def step_done(job: LiveJob, step: int) -> None:
    """It completed a step. A step that it repeats after a restart is no progress."""
    if step > job.furthest_step:
        job.furthest_step, job.restarts_before = step, job.life.restarts
        job.failures = job.vain_losses = 0


def may_restart(job: LiveJob, cause: Cause) -> bool:
    """Whether it may start again. `max_restarts` of its owner counts restarts of every kind."""
    if cause is Cause.UNBEGUN:
        return job.failures < MAX_UNBEGUN
    if cause is Cause.FAILED or "max_restarts" in job.given:
        return bool(job.life.restarts < job.spec["max_restarts"])
    return job.life.restarts - job.restarts_before < LOST_RESTARTS


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
