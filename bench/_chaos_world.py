"""What `bench/chaos.py` acts on and looks at: the server process, its workers as the machine shows them, the record."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from shoal.executors.keeper import start_time
from shoal.executors.keeper_files import read_started

PREFIX = "/api/v1"


@dataclass(frozen=True)
class Process:
    """A worker on this machine: its own process and its keeper."""

    worker: str
    pid: int
    keeper: int
    directory: Path
    on_agent: bool  # not on the server's own machine


class Server:
    """A server process that may be killed and started again at any time."""

    def __init__(self, base: Path, gpus: int, policy: str) -> None:
        self.base, self.home = base, base / "home"
        self._options = ("--gpus", str(gpus), "--policy", policy)
        self.process: subprocess.Popen[bytes] | None = None
        self.begin()

    def begin(self) -> None:
        with (self.base / "server.log").open("ab") as log:
            command = [sys.executable, "-m", "shoal.server.serve", "--home", str(self.home), *self._options]
            self.process = subprocess.Popen(command, stdout=log, stderr=log)

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def address(self) -> str | None:
        """Where it listens, once it does."""
        with contextlib.suppress(OSError, ValueError):
            found = json.loads((self.home / "server.json").read_text())
            if found["pid"] == self.pid:
                return str(found["address"])
        return None

    def wait(self, limit_s: float = 120.0) -> str:
        deadline = time.monotonic() + limit_s
        while (address := self.address()) is None:
            assert self.process is not None
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(
                    "the server does not start: " + (self.base / "server.log").read_text()[-2000:]
                )
            time.sleep(0.05)
        return address

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def zygote(self) -> int | None:
        """The warm parent of this server."""
        for pid in _pids():
            with contextlib.suppress(OSError, IndexError, ValueError):
                stat = Path(f"/proc/{pid}/stat").read_text()
                parent = int(stat.rpartition(")")[2].split()[1])
                if parent == self.pid and b"zygote" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    return pid
        return None

    def workers(self) -> list[Process]:
        """The workers whose own process runs, by the files of their keepers."""
        found = []
        for directory in self.worker_directories():
            started = None if (directory / "exit").exists() else read_started(directory)
            if started is not None and start_time(started.pid) == started.start_time:
                on_agent = directory.is_relative_to(self.base / "agent")
                found.append(Process(directory.name, started.pid, started.keeper_pid, directory, on_agent))
        return found

    def worker_directories(self) -> list[Path]:
        """Of the server's own machine, and of the agent that stands for another."""
        here = (self.home / "jobs").glob("*/workers/*")
        return [*here, *(self.base / "agent" / "workers").glob("*")]

    @contextlib.contextmanager
    def record(self) -> Iterator[sqlite3.Connection]:
        with contextlib.closing(
            sqlite3.connect(f"file:{self.home / 'shoal.db'}?mode=ro", uri=True)
        ) as connection:
            yield connection

    def workdir(self, key: int) -> Path:
        """The working directory of a submission, by which its processes are found, also forked and detached ones."""
        found = self.base / "work" / str(key)
        found.mkdir(parents=True, exist_ok=True)
        return found

    def processes_of_jobs(self) -> dict[int, list[int]]:
        """The running processes of each submission."""
        found: dict[int, list[int]] = {}
        for pid in _pids():
            with contextlib.suppress(OSError):
                place = Path(os.readlink(f"/proc/{pid}/cwd"))
                if place.parent == self.base / "work":
                    found.setdefault(int(place.name), []).append(pid)
        return found


class Agent:
    """An agent process on this machine that stands for another machine with GPUs of its own."""

    def __init__(self, base: Path, join: str, token: str, gpus: int) -> None:
        self._log, token_file = base / "agent.log", base / "join.token"
        token_file.write_text(token)
        token_file.chmod(0o600)
        self._command = [
            *(str(Path(sys.executable).with_name("shoal")), "agent", "--join", join, "--gpus", str(gpus)),
            *("--token-file", str(token_file), "--name", "other", "--state", str(base / "agent")),
        ]
        self.begin()

    def begin(self) -> None:
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(self._command, stdout=log, stderr=log)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()]


class User:
    """One person who uses the API. A call whose answer did not arrive gives None: nobody knows what came of it."""

    def __init__(self, name: str, token: str) -> None:
        self.name, self._headers = name, {"Authorization": f"Bearer {token}"}
        self._http = httpx.Client(headers=self._headers, timeout=10)

    def call(self, address: str, method: str, path: str, **options: Any) -> httpx.Response | None:
        try:
            reply = self._http.request(method, address + PREFIX + path, **options)
        except httpx.HTTPError:
            return None
        if reply.status_code >= 500:
            raise AssertionError(f"{method} {path} answered {reply.status_code}: {reply.text}")
        return reply


def used_twice(server: Server) -> list[str]:
    """GPUs that two running processes use by the record. Suspended workers ("stopped") have given theirs away."""
    with server.record() as record:
        rows = record.execute(
            "select id, node, gpu, more_gpus, state from workers where state != 'stopped'"
        ).fetchall()
    gpus_of = {row[0]: [(row[1], gpu) for gpu in (row[2], *json.loads(row[3] or "[]"))] for row in rows}
    state_of = {row[0]: row[4] for row in rows}
    owner: dict[Any, str] = {}
    found = []
    for process in server.workers():
        for gpu in gpus_of.get(process.worker, []):
            if owner.setdefault(gpu, process.worker) != process.worker:
                both = [f"{worker} ({state_of[worker]})" for worker in (owner[gpu], process.worker)]
                found.append(f"GPU {gpu} is used by {' and '.join(both)}")
    return found


def gaps(server: Server, after: int) -> tuple[int, list[int]]:
    """(the last event, ids that are missing after `after`)."""
    with server.record() as record:
        ids = [row[0] for row in record.execute("select id from events where id > ? order by id", (after,))]
    last = ids[-1] if ids else after
    return last, sorted(set(range(after + 1, last + 1)) - set(ids))
