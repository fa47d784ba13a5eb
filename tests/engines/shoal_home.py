"""A Shoal server on an engine, driven by the real command line, and gone afterwards."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from shoal.client import Client
from shoal.server.api import models as m

SHOAL = [sys.executable, "-m", "shoal.cli.main"]
#: Steps that take their time, divided by the workers. Each worker prints its steps.
SCRIPT = Path(__file__).parents[1] / "cluster" / "scripts" / "steps.py"
#: Longer than any restart of the server takes.
LEASE_S = 60


class ShoalHome:
    def __init__(self, home: Path, environ: dict[str, str]) -> None:
        self.home = home
        outside = {k: v for k, v in environ.items() if not k.startswith("SHOAL_")}
        self.env = {**outside, "SHOAL_HOME": str(home), "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}
        self._client: Client | None = None
        self._states: set[str] = set()

    def shoal(self, *args: object, code: int | None = 0) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [*SHOAL, *map(str, args)],
            env=self.env,
            capture_output=True,
            text=True,
            timeout=150,
            cwd=self.home.parent,
        )
        assert "Traceback" not in done.stderr, done.stderr
        assert code is None or done.returncode == code, (
            args,
            done.returncode,
            done.stdout,
            done.stderr,
            self.log(),
        )
        return done

    def up(self, *args: object, code: int = 0) -> subprocess.CompletedProcess[str]:
        self._client = None
        return self.shoal("up", "--lease", f"{LEASE_S}s", "--advertise", "127.0.0.1", *args, code=code)

    def down(self, *args: object) -> subprocess.CompletedProcess[str]:
        self._client = None
        return self.shoal("down", "-y", "--timeout", "100s", *args)

    @property
    def client(self) -> Client:
        if self._client is None:
            self._client = Client(home=self.home)
        return self._client

    @property
    def server(self) -> psutil.Process:
        return psutil.Process(json.loads((self.home / "server.json").read_text())["pid"])

    def kill_server(self) -> None:
        server = self.server
        server.kill()
        server.wait(10)
        self._client = None

    def log(self) -> str:
        path = self.home / "server.log"
        return path.read_text()[-6000:] if path.exists() else ""

    # Jobs

    def train(self, name: str, gpus: str, *options: object, steps: int = 5000, step_s: float = 0.3) -> None:
        command = [sys.executable, SCRIPT, steps, step_s]
        self.shoal("run", "-d", "--name", name, "--gpus", gpus, *options, "--", *command)

    def job(self, name: str) -> m.Job:
        return self.client.job(name)

    def until(self, what: Callable[[], Any], words: str, limit_s: float = 180.0) -> Any:
        """Poll until this holds. The limit only ends a test that hangs."""
        end_s = time.monotonic() + limit_s
        while True:
            found = what()
            if found:
                return found
            assert time.monotonic() < end_s, f"not within {limit_s:g} s: {words}\n{self.describe()}"
            time.sleep(0.1)

    def describe(self) -> str:
        nodes = [(n.name, n.state, n.used, n.why, n.engine) for n in self.client.nodes()]
        jobs = [(j.name, j.state, j.gpus, j.message) for j in self.client.jobs()]
        return f"nodes {nodes}\njobs {jobs}\n{self.log()}"

    def size(self, name: str, gpus: int) -> m.Job:
        """Wait until the job trains on so many GPUs."""
        found: m.Job = self.until(
            lambda: (j := self.job(name)).gpus == gpus and j.state == "running" and j,
            f"{name} has {gpus} GPUs",
        )
        return found

    def trains_on(self, name: str) -> None:
        """Wait until the job has taken further steps."""
        before = self.job(name).step or 0
        self.until(lambda: (self.job(name).step or 0) > before + 1, f"{name} takes steps")

    def nodes(self, state: str = "ready") -> list[m.NodeStatus]:
        return [n for n in self.client.nodes() if n.state == state]

    def ready(self, n: int) -> list[m.NodeStatus]:
        found: list[m.NodeStatus] = self.until(
            lambda: len(f := self.nodes()) == n and (f or True), f"{n} nodes ready"
        )
        return self.nodes() if found is True else found

    # Processes

    def agents(self) -> dict[str, psutil.Process]:
        """The agents of this home, by name. Their state directories are remembered for `workers`."""
        port = self.agents_port
        found = {}
        for process in psutil.process_iter():
            argv = _argv(process)
            if "agent" in argv and any(a.endswith(f":{port}") for a in argv) and "--state" in argv:
                self._states.add(argv[argv.index("--state") + 1])
                found[argv[argv.index("--name") + 1]] = process
        return found

    @property
    def agents_port(self) -> int:
        with sqlite3.connect(f"file:{self.home}/shoal.db?mode=ro", uri=True) as store:
            (port,) = store.execute("select value from settings where key = 'agents_port'").fetchone()
        return int(port)

    def credentials(self) -> dict[str, str]:
        """The secret of each agent of this home, by the agent's name."""
        found = {}
        for name, process in self.agents().items():
            argv = _argv(process)
            found[name] = Path(argv[argv.index("--state") + 1], "credential").read_text().strip()
        return found

    def workers(self, name: str) -> dict[str, int]:
        """The pid of each live worker of a job that an agent of this home started, by the worker's id."""
        self.agents()
        found = {}
        for state in self._states:
            for path in Path(state, "workers").glob(f"{self.job(name).id}.*"):
                pid = _pid_of(path)
                if pid is not None and psutil.pid_exists(pid):
                    found[path.name] = pid
        return found

    def gpus_of(self, name: str) -> dict[str, tuple[str, int]]:
        """Node and GPU of each worker of a job, by the worker's id."""
        return {w.id: (w.node, w.gpu) for w in self.job(name).workers if w.state != "ended"}

    def left(self) -> list[str]:
        """Processes of this home: servers, launchers, agents and keepers."""
        self.agents()
        marks = [str(self.home), *self._states]
        others = [_argv(p) for p in psutil.process_iter() if p.pid != os.getpid()]
        return [" ".join(argv) for argv in others if any(mark in a for a in argv for mark in marks)]


def _argv(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline() if process.status() != psutil.STATUS_ZOMBIE else []
    except psutil.Error:
        return []


def _pid_of(worker: Path) -> int | None:
    try:
        return int(json.loads((worker / "started").read_text())["pid"])
    except (OSError, ValueError, KeyError):
        return None
