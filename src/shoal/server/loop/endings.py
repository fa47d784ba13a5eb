"""Ends jobs that the server itself must end: at their time limit, and when what they wait for can never come.

It warns jobs of their end: at the time limit, and where a machine is taken away from a command that cannot move.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping
from typing import Protocol

from shoal.core.events import Event, Finished
from shoal.core.words import spoken
from shoal.server.api.models import JobState, Resize
from shoal.server.loop.dependencies import Dependencies
from shoal.server.loop.lifecycle import Verb, apply, may, settle
from shoal.server.loop.live_job import LEAVING, LiveJob
from shoal.server.loop.node_table import NodeTable
from shoal.server.loop.outbox import Outbox
from shoal.server.loop.runner import Runner
from shoal.server.store.store import Store

#: Interval between looks at jobs with a time limit.
LOOK_S = 0.5
#: A live job is asked for a checkpoint this part of its time limit before the end, if that is less than `warn_s`.
WARN_PART = 0.1
WARN_S = 60.0


class EndingsLoop(Protocol):
    """What this needs of the control loop."""

    @property
    def runners(self) -> Mapping[Resize, Runner]: ...

    @property
    def table(self) -> NodeTable: ...

    @property
    def is_running(self) -> bool: ...

    @property
    def settle_soon(self) -> Callable[[], None]: ...

    def now_s(self) -> float: ...

    def take_in(self, *events: Event) -> None: ...

    def cancel(self, job: LiveJob) -> None: ...

    def ask_checkpoint(self, job: LiveJob) -> bool: ...

    def warn(self, worker_id: str, signal: str) -> None: ...


class Endings:
    def __init__(self, loop: EndingsLoop, jobs: Mapping[int, LiveJob], store: Store, outbox: Outbox) -> None:
        self._loop, self._jobs, self._outbox = loop, jobs, outbox
        self._dependencies = Dependencies(jobs, store)
        self._task: asyncio.Task[None] | None = None
        #: Jobs that were warned that their machine leaves. After a restart of the server they are warned again.
        self._told: set[int] = set()

    def start(self) -> None:
        self._task = asyncio.create_task(self._look_regularly())

    def begin(self) -> None:
        """The server continues: end the jobs whose dependency ended badly while no server ran."""
        for job in list(self._jobs.values()):
            self._end_if_never(job)

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()

    # -- dependencies ------------------------------------------------------------------------------

    def job_over(self, job: LiveJob) -> None:
        """A job is over: once that is on record, tell those that wait for it, and end those that can never run."""
        self._outbox.effect(lambda: self._ended(job.id, job.life.state is JobState.SUCCEEDED))

    def _ended(self, job_id: int, succeeded: bool) -> None:
        dependents = self._dependencies.of(job_id)
        if not dependents or not self._loop.is_running:
            return
        self._loop.take_in(Finished(job_id, succeeded))
        for job in dependents:
            self._end_if_never(job)

    def _end_if_never(self, job: LiveJob) -> None:
        if not job.spec.get("after") or not may(job.life, Verb.CANCEL):
            return
        why = self._dependencies.never(job)
        if why is not None:
            job.life = apply(job.life, Verb.CANCEL, self._loop.now_s(), why)
            self._outbox.job(job)
            self._outbox.event(Verb.CANCEL.value, why, job)
            self._loop.cancel(job)

    # -- time limits -------------------------------------------------------------------------------

    async def _look_regularly(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            if self._loop.is_running:
                self.look()

    def look(self) -> None:
        """Warn the jobs that are near their end, and end those that have reached their time limit."""
        self._told &= self._jobs.keys()
        for job in list(self._jobs.values()):
            if job.ending is not None or not job.workers or job.is_over:
                continue
            if job.life.state is JobState.STOPPING:
                continue
            self._look_at_machines(job)
            limit_s = job.spec.get("time_limit_s")
            if limit_s is None:
                continue
            left_s = limit_s - settle(job.life, self._loop.now_s()).running_s
            if not job.warned and left_s <= warned_at_s(job):
                self._warn(job, max(left_s, 0.0))  # also if this look comes late: no job ends unwarned
            elif left_s <= 0:
                self._end(job, limit_s)

    def _warn(self, job: LiveJob, left_s: float) -> None:
        job.warned = True
        self._outbox.job(job)
        asked = self._loop.ask_checkpoint(job) if job.gpus else False
        how = self._signal(job)
        how += ["was asked for a checkpoint"] if asked else []
        text = f"its time limit is over in {left_s:.0f} s" + (f"; it {' and '.join(how)}" if how else "")
        self._outbox.event("job.warned", text, job, left_s=left_s)
        self._loop.settle_soon()

    def _signal(self, job: LiveJob) -> list[str]:
        """Send its workers the signal that it wants, if any. Returns what they got, for people."""
        signal = job.spec.get("warn_signal")
        if signal is not None:
            for worker in job.workers.values():
                if worker.state != LEAVING:
                    self._outbox.effect(lambda w=worker.id: self._loop.warn(w, signal))  # type: ignore[misc]
        return [f"got SIG{signal}"] if signal else []

    # -- machines that leave -----------------------------------------------------------------------

    def _look_at_machines(self, job: LiveJob) -> None:
        """Warn a command that can neither move nor save: it runs until its machine is taken away."""
        if job.resize is not Resize.NEVER or job.life.state is not JobState.RUNNING:
            return
        table, now_s = self._loop.table, self._loop.now_s()
        nodes = {worker.device[0] for worker in job.workers.values()}
        leaving = [(*leaves, node) for node in nodes if (leaves := table.records[node].leaves) is not None]
        at_s, why, node = min(leaving, default=(math.inf, "", -1))
        if at_s - now_s > job.spec.get("warn_s", WARN_S):
            self._told.discard(job.id)
        elif job.id not in self._told:
            self._told.add(job.id)
            left_s = max(at_s - now_s, 0.0)
            text = f"node {table.infos[node].name} is taken away in {left_s:.0f} s ({why}) and the command cannot move"
            how = self._signal(job)
            self._outbox.event("job.warned", "; it ".join([text, *how]), job, left_s=left_s)
            self._loop.settle_soon()

    def _end(self, job: LiveJob, limit_s: float) -> None:
        job.timed_out = True
        why = f"its time limit of {spoken(limit_s)} is over"
        self._loop.runners[job.resize].end(job, why)
        self._loop.settle_soon()


def warned_at_s(job: LiveJob) -> float:
    """How long before its time limit a job is warned."""
    warn_s: float = job.spec.get("warn_s", WARN_S)
    return warn_s if job.spec.get("warn_signal") else min(warn_s, WARN_PART * job.spec["time_limit_s"])
