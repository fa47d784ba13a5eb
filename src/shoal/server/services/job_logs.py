"""The output of all workers of a job, merged by time, with a cursor that stays valid over resizes and restarts."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TypeVar

from shoal.executors.logs import Line, position_at, read_lines, tail_position
from shoal.server.api import models as m
from shoal.server.loop.clock import as_time
from shoal.server.services.errors import Invalid, RequestError
from shoal.server.store.store import Store

#: The directory of a worker, by job and worker id.
WorkerDirectory = Callable[[int, str], Path]

CHUNK_BYTES = 256 * 1024
#: Requests of one user that read logs at the same time.
READS_OF_USER = 2
#: Threads that read logs. They are not those of the event loop, on which other work of the server must not wait.
THREADS = 8
#: Interval between looks whether a client is still there.
LOOK_S = 0.2
HasLeft = Callable[[], Awaitable[bool]]
T = TypeVar("T")
_CURSOR = re.compile(r"(\d{1,12}:\d{1,18})(,\d{1,12}:\d{1,18})*")


class ClientLeft(RequestError):
    """Nobody waits for the answer any more."""

    status, code = 499, "client_left"


@dataclass(frozen=True, slots=True)
class LogFilter:
    """Which lines to read; None: all."""

    worker: str | None = None
    rank: int | None = None
    attempt: int | None = None
    since_s: float | None = None


class Logs:
    def __init__(self, store: Store, worker_directory: WorkerDirectory) -> None:
        self._store, self._worker_directory = store, worker_directory
        self._turns: dict[str, asyncio.Semaphore] = {}
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="shoal-logs")

    def of(self, job_id: int, chosen: LogFilter) -> JobLogs:
        """A reader of one job's output."""
        return JobLogs(self._store, self._worker_directory, job_id, chosen)

    async def read_in_turn(
        self, user: str, reader: JobLogs, read: Callable[[], T], has_left: HasLeft | None = None
    ) -> T:
        """Call `read`, which uses `reader`, in a thread. Raise `ClientLeft` if the client leaves.

        The requests of a user take turns, so that the logs of one user do not take all threads.
        """
        turns = self._turns.setdefault(user, asyncio.Semaphore(READS_OF_USER))
        watch = None if has_left is None else asyncio.create_task(_watch(has_left, reader))
        try:
            async with turns:
                reader.go_on()
                return await asyncio.get_running_loop().run_in_executor(self._threads, read)
        except asyncio.CancelledError:
            reader.client_left.set()  # the thread goes on by itself
            raise
        finally:
            if watch is not None:
                watch.cancel()


async def _watch(has_left: HasLeft, reader: JobLogs) -> None:
    while not await has_left():
        await asyncio.sleep(LOOK_S)
    reader.client_left.set()


class JobLogs:
    """A reader of one job's output. Its cursor is `number:position` of each worker: `0:1204,1:88`."""

    def __init__(
        self, store: Store, worker_directory: WorkerDirectory, job_id: int, chosen: LogFilter
    ) -> None:
        self._store, self._worker_directory = store, worker_directory
        self._job_id, self._chosen = job_id, chosen
        self._position: dict[int, int] = {}
        self._ranks: dict[int, int | None] = {}
        #: Set it to end a read in another thread.
        self.client_left = threading.Event()

    def go_on(self) -> None:
        """Called between two pieces of work."""
        if self.client_left.is_set():
            raise ClientLeft("the client has left")

    def begin(self, cursor: str | None, tail: int | None) -> None:
        """Start at a cursor, or `tail` lines before the end, or at the beginning. Call `look_for_workers` first."""
        if cursor and not _CURSOR.fullmatch(cursor):
            raise Invalid("cursor: the server did not give out this cursor", "cursor")
        if cursor:
            pairs = (part.partition(":") for part in cursor.split(","))
            self._position = {int(number): int(position) for number, _, position in pairs}
        elif tail is not None:
            for number in self._ranks:
                self.go_on()
                self._position[number] = tail_position(self._directory(number), tail)
            found = self._next_lines()
            # `tail` lines of all workers, not of each
            for _, number, line in found[: max(len(found) - tail, 0)]:
                self._position[number] = line.end
        if self._chosen.since_s is not None:
            for number in self._ranks:
                self.go_on()
                since = position_at(self._directory(number), self._chosen.since_s)
                self._position[number] = max(since, self._position.get(number, 0))

    def look_for_workers(self) -> None:
        chosen = self._chosen
        attempts = {} if chosen.attempt is None else self._attempts()
        for row in self._store.workers_of(self._job_id):
            right_one = chosen.worker in (None, row["id"]) and chosen.rank in (None, row["rank"])
            if right_one and chosen.attempt in (None, attempts.get(row["id"])):
                self._ranks[int(row["id"].split(".")[1])] = row["rank"]

    def _attempts(self) -> dict[str, int]:
        """Restarts of the job before each worker started."""
        found: dict[str, int] = {}
        attempt = 0
        types = ("job.restarted", "worker.started")
        for event in self._store.events_of_job(self._job_id, types):
            if event["type"] == "job.restarted":
                attempt += 1
            else:
                found[event["data"]["worker"]] = attempt
        return found

    def _directory(self, number: int) -> Path:
        return self._worker_directory(self._job_id, f"{self._job_id}.{number}")

    @property
    def cursor(self) -> str:
        return ",".join(f"{n}:{p}" for n, p in sorted(self._position.items())) or "0:0"

    def read(self, limit: int) -> list[m.LogLine]:
        """The next lines; empty if there are none yet."""
        while True:
            out, more = self._read(limit)
            if out or not more:
                return out

    def _next_lines(self, limit: int | None = None) -> list[tuple[float, int, Line]]:
        """(time, worker number, line) after the position of each worker, at most `limit` of each, by time."""
        found: list[tuple[float, int, Line]] = []
        for number in sorted(self._ranks):
            self.go_on()
            lines = read_lines(self._directory(number), self._position.get(number, 0), CHUNK_BYTES)
            # The lines of a worker stay in order, even if the clock of its machine was set back in between.
            times = accumulate((line.at_s for line in lines[:limit]), max)
            found += [(at_s, number, line) for at_s, line in zip(times, lines)]
        return sorted(found, key=lambda entry: entry[:2])

    def _read(self, limit: int) -> tuple[list[m.LogLine], bool]:
        """(lines, whether any were read, including those before `since_s`)."""
        found = self._next_lines(limit)
        out = []
        for at_s, number, line in found[:limit]:
            self._position[number] = line.end
            if self._chosen.since_s is None or at_s >= self._chosen.since_s:
                out.append(
                    m.LogLine(
                        at=as_time(at_s),
                        worker=f"{self._job_id}.{number}",
                        rank=self._ranks[number],
                        text=line.text,
                        cursor=self.cursor,
                    )
                )
        return out, bool(found)
