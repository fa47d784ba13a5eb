"""Commands that people run next to the workers of a job: `shoal exec`, and `shoal run --interactive`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from shoal.agents.sessions import FleetSessions, RemoteSession
from shoal.executors.sessions import SessionError
from shoal.server.api.models import ExecStart, JobState
from shoal.server.loop.live_job import ACTIVE, LiveJob, LiveWorker
from shoal.server.services.errors import Busy, Conflict, NotFound

MAX_SESSIONS_OF_USER = 8
#: A session whose reader has not been heard of for so long is ended; so is an interactive job without a session.
SILENT_S = 60.0
POLL_S = 10.0
LOOK_S = 5.0


class SessionLoop(Protocol):
    """What sessions need of the control loop."""

    @property
    def jobs(self) -> Mapping[int, LiveJob]: ...

    def now_s(self) -> float: ...


@dataclass(slots=True)
class Open:
    session: RemoteSession
    user: str
    job: int
    heard_s: float


class Sessions:
    def __init__(
        self, loop: SessionLoop, fleet: FleetSessions | None, cancel: Callable[[LiveJob, str], None]
    ) -> None:
        """`fleet` is None for an executor without agents. `cancel` ends a job, and gets the reason."""
        self._loop, self._fleet, self._cancel = loop, fleet, cancel
        self._open: dict[str, Open] = {}
        #: When an interactive job was last used.
        self._used_s: dict[int, float] = {}
        self._task: asyncio.Task[None] | None = None

    def start(self, job: LiveJob, given: ExecStart, user: str) -> str:
        if sum(o.user == user for o in self._open.values()) >= MAX_SESSIONS_OF_USER:
            raise Busy(
                f"you have {MAX_SESSIONS_OF_USER} sessions open, which is the limit", "end one of them"
            )
        worker = self._worker(job, given.rank)
        try:
            if self._fleet is None:
                raise SessionError("this server cannot run commands next to workers")
            name, session = self._fleet.open(
                worker.id, given.command, tty=given.tty, rows=given.rows, columns=given.columns
            )
        except SessionError as error:
            raise Conflict(str(error)) from None
        self._open[name] = Open(session, user, job.id, self._loop.now_s())
        return name

    def _worker(self, job: LiveJob, rank: int | None) -> LiveWorker:
        running = [w for w in job.workers.values() if w.state == ACTIVE]
        if not running:
            raise Conflict(f"job {job.name} is {job.life.state.value}: no worker of it runs")
        if rank is None:
            return min(running, key=lambda w: w.rank or 0)
        found = next((w for w in running if w.rank == rank), None)
        if found is None:
            ranks = ", ".join(str(w.rank) for w in running[:10])
            raise NotFound(f"job {job.name} has no running rank {rank}; it has {ranks}")
        return found

    def find(self, name: str, user: str) -> Open:
        found = self._open.get(name)
        if found is None or found.user != user:
            raise NotFound("there is no such session; it has ended, or the server was restarted")
        found.heard_s = self._used_s[found.job] = self._loop.now_s()
        return found

    async def output(self, name: str, user: str, after: int) -> tuple[bytes, int, int | None]:
        """(data, position after it, exit code if it has ended and all was read). Waits a while for more."""
        found = self.find(name, user)
        session = found.session
        data = session.take(after)
        if not data and session.exit_code is None:
            session.changed.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(session.changed.wait(), POLL_S)
            data = session.take(after)
        if data or session.exit_code is None:
            return data, session.begin + len(data), None
        self.end(name, user)
        return b"", after, session.exit_code

    def end(self, name: str, user: str) -> None:
        found = self.find(name, user)
        self._close(name)
        job = self._loop.jobs.get(found.job)
        if job is not None and job.spec.get("interactive"):
            self._cancel(job, "its session has ended")

    def _close(self, name: str) -> None:
        del self._open[name]
        if self._fleet is not None:
            self._fleet.close(name)

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
        for name in list(self._open):
            self._close(name)

    def begin(self) -> None:
        """Begin to watch sessions, and interactive jobs: also those of an earlier server, whose sessions have ended."""
        self._task = asyncio.get_running_loop().create_task(self._look())

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            self.look()

    def look(self) -> None:
        """End sessions whose reader is gone, and interactive jobs that nobody uses."""
        now_s = self._loop.now_s()
        self._used_s = {job: used_s for job, used_s in self._used_s.items() if job in self._loop.jobs}
        for name, found in list(self._open.items()):
            if now_s - found.heard_s > SILENT_S:
                self._close(name)
        for job in list(self._loop.jobs.values()):
            if job.spec.get("interactive") and job.life.state is JobState.RUNNING:
                used_s = self._used_s.setdefault(job.id, now_s)
                if now_s - used_s > SILENT_S:
                    self._cancel(job, "nobody uses its terminal any more")
