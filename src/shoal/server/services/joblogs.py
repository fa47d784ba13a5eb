"""The output of all workers of a job as one, merged by time, with a cursor that survives resizes and restarts."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.executors.logs import Line, read_lines, tail_position
from shoal.server.api import models as m
from shoal.server.api.errors import Invalid
from shoal.server.loop.clock import as_time

if TYPE_CHECKING:
    from shoal.server.api.routes.common import Server

CHUNK_BYTES = 256 * 1024
_CURSOR = re.compile(r"(\d{1,12}:\d{1,18})(,\d{1,12}:\d{1,18})*")


@dataclass(frozen=True, slots=True)
class Chosen:
    """Which lines are asked for; None: all."""

    worker: str | None = None
    rank: int | None = None
    attempt: int | None = None
    since_s: float | None = None


class JobLogs:
    """A cursor is `number:position` of each worker, so that it stays short: `0:1204,1:88`."""

    def __init__(self, server: Server, job_id: int, chosen: Chosen) -> None:
        self._s, self._job_id, self._chosen = server, job_id, chosen
        self._position: dict[int, int] = {}
        self._ranks: dict[int, int | None] = {}

    def begin(self, cursor: str | None, tail: int | None) -> None:
        """From a cursor, or from the last lines, or from the beginning."""
        if cursor and not _CURSOR.fullmatch(cursor):
            raise Invalid("cursor: it is not one that was given out", "cursor")
        self.look_for_workers()
        if cursor:
            for part in cursor.split(","):
                number, _, position = part.partition(":")
                self._position[int(number)] = int(position)
        elif tail is not None:
            for number in self._ranks:
                self._position[number] = tail_position(self._directory(number), tail)
            found = self._next_lines()
            for _, number, line in found[: max(len(found) - tail, 0)]:  # the last of all, not of each
                self._position[number] = line.end

    def look_for_workers(self) -> None:
        chosen = self._chosen
        attempts = {} if chosen.attempt is None else self._attempts()
        for row in self._s.store.workers_of(self._job_id):
            right_one = chosen.worker in (None, row["id"]) and chosen.rank in (None, row["rank"])
            if right_one and chosen.attempt in (None, attempts.get(row["id"])):
                self._ranks[int(row["id"].split(".")[1])] = row["rank"]

    def _attempts(self) -> dict[str, int]:
        """Of each worker: how often the job had been started again when it began."""
        found: dict[str, int] = {}
        attempt = 0
        types = ("job.restarted", "worker.started")
        for event in self._s.store.events_of_job(self._job_id, types):
            if event["type"] == "job.restarted":
                attempt += 1
            else:
                found[event["data"]["worker"]] = attempt
        return found

    def _directory(self, number: int) -> Path:
        return self._s.conductor.worker_directory(self._job_id, f"{self._job_id}.{number}")

    @property
    def cursor(self) -> str:
        return ",".join(f"{n}:{p}" for n, p in sorted(self._position.items())) or "0:0"

    def read(self, limit: int) -> list[m.LogLine]:
        """The next lines; none if there are no more now."""
        while True:
            out, more = self._read(limit)
            if out or not more:
                return out

    def _next_lines(self, limit: int | None = None) -> list[tuple[float, int, Line]]:
        """(time, worker, line) from where each worker was read to, so many of each, by time."""
        found: list[tuple[float, int, Line]] = []
        for number in sorted(self._ranks):
            lines = read_lines(self._directory(number), self._position.get(number, 0), CHUNK_BYTES)
            found += [(line.at_s, number, line) for line in lines[:limit]]
        return sorted(found, key=lambda entry: entry[:2])

    def _read(self, limit: int) -> tuple[list[m.LogLine], bool]:
        """(lines, whether there were any, also too old ones). Merged by time as far as each worker was read."""
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
