"""Commands that people run next to the workers of a job: `shoal exec`, and `shoal run --interactive`."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from shoal.executors.sessions import Session
from shoal.server.api.models import ExecStart, JobState
from shoal.server.loop.live_job import ACTIVE, LiveJob, LiveWorker
from shoal.server.services.errors import Busy, Conflict, NotFound

MAX_SESSIONS_OF_USER = 8
#: A session whose reader has not been heard of for so long is ended; so is an interactive job without a session.
SILENT_S = 60.0
POLL_S = 10.0
#: Processes that a command leaves behind may keep its output open: it is read so long after the last of it.
LAST_S = 0.5
LOOK_S = 5.0


class SessionLoop(Protocol):
    """What sessions need of the control loop."""

    @property
    def jobs(self) -> Mapping[int, LiveJob]: ...

    def now_s(self) -> float: ...


#: The specification of a worker on this machine, or None if it is on another.
SpecOf = Callable[[str], "dict[str, Any] | None"]


@dataclass(slots=True)
class Open:
    session: Session
    user: str
    job: int
    worker: str
    heard_s: float


class Sessions:
    def __init__(self, loop: SessionLoop, spec_of: SpecOf, cancel: Callable[[LiveJob, str], None]) -> None:
        """`cancel` ends a job, and gets the reason."""
        self._loop, self._spec_of, self._cancel = loop, spec_of, cancel
        self._open: dict[str, Open] = {}
        #: When an interactive job was last used.
        self._used_s: dict[int, float] = {}
        self._task: asyncio.Task[None] | None = None

    def start(self, job: LiveJob, given: ExecStart, user: str) -> str:
        self._watch()
        if sum(o.user == user for o in self._open.values()) >= MAX_SESSIONS_OF_USER:
            raise Busy(
                f"you have {MAX_SESSIONS_OF_USER} sessions open, which is the limit", "end one of them"
            )
        worker = self._worker(job, given.rank)
        spec = self._spec_of(worker.id)
        if spec is None:
            raise Conflict(
                f"worker {worker.id} is not on the server's machine, or was started by an earlier server: "
                "a command cannot be run next to it"
            )
        session = Session(spec, given.command, tty=given.tty, rows=given.rows, columns=given.columns)
        name = secrets.token_urlsafe(16)
        self._open[name] = Open(session, user, job.id, worker.id, self._loop.now_s())
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
        if not data and (session.is_open or not session.is_over):
            session.changed.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(session.changed.wait(), LAST_S if session.is_over else POLL_S)
            data = session.take(after)
        if data or not session.is_over:
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
        self._open.pop(name).session.close()

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
        for name in list(self._open):
            self._close(name)

    def _watch(self) -> None:
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._look())

    def interactive_job(self) -> None:
        """A job was submitted that must not outlive its terminal."""
        self._watch()

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            self.look()

    def look(self) -> None:
        """End sessions whose worker has ended or whose reader is gone, and interactive jobs that nobody uses."""
        now_s = self._loop.now_s()
        for name, found in list(self._open.items()):
            job = self._loop.jobs.get(found.job)
            if job is None or found.worker not in job.workers:
                found.session.kill()  # its reader learns how it ended
            if now_s - found.heard_s > SILENT_S:
                self._close(name)
        for job in list(self._loop.jobs.values()):
            if job.spec.get("interactive") and job.life.state is JobState.RUNNING:
                used_s = self._used_s.setdefault(job.id, now_s)
                if now_s - used_s > SILENT_S:
                    self._cancel(job, "nobody uses its terminal any more")
