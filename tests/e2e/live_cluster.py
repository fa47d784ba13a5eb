"""A cluster of virtual GPUs in a temporary home, driven by the real command line, and gone afterwards."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
from forked import run_forked

from shoal.client import Client

SHOAL = [sys.executable, "-m", "shoal.cli.main"]
ROOT = Path(__file__).resolve().parents[2]


class Cluster:
    """One home. `shoal(...)` runs a command in it and gives what it printed and its exit code."""

    def __init__(self, home: Path) -> None:
        self.home = home
        outside = {k: v for k, v in os.environ.items() if not k.startswith("SHOAL_")}
        self.env = {**outside, "SHOAL_HOME": str(home), "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}

    def shoal(self, *args, code=None, timeout=60, env=None, stdin="", cwd=None):
        given = self.env | (env or {})
        done = run_forked(list(map(str, args)), env=given, stdin=stdin, cwd=cwd, timeout=timeout)
        assert "Traceback" not in done.stderr, done.stderr
        if code is not None:
            assert done.returncode == code, f"{args}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    def start(self, *args, **kwargs):
        """A command that goes on, in a group of its own: Ctrl-C goes to the group."""
        return subprocess.Popen(
            [*SHOAL, *map(str, args)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=self.env,
            start_new_session=True,
            **kwargs,
        )

    def json(self, *args, code=0):
        return json.loads(self.shoal(*args, "-o", "json", code=code).stdout)

    def up(self, *, gpus=4, policy="max-min", **kwargs):
        return self.shoal("up", "--gpus", gpus, "--policy", policy, code=0, **kwargs)

    def client(self, **kwargs) -> Client:
        return Client(home=self.home, **kwargs)

    @property
    def server_pid(self) -> int:
        return json.loads((self.home / "server.json").read_text())["pid"]

    def kill_server(self) -> None:
        """kill -9: no chance to tidy up."""
        process = psutil.Process(self.server_pid)
        process.kill()
        process.wait(10)

    def processes(self) -> list[psutil.Process]:
        """The server, keepers and workers of this home: its path is in what they were given."""
        return [p for p in psutil.process_iter() if self._is_ours(p)]

    def _is_ours(self, process) -> bool:
        try:
            given = [*process.cmdline(), *process.environ().values()]
        except psutil.Error:
            return False
        return process.pid != os.getpid() and any(str(self.home) in text for text in given)

    def close(self) -> None:
        """Whatever a test did, nothing is left."""
        with contextlib.suppress(Exception):
            self.shoal("down", "-y", timeout=30)
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                process.send_signal(signal.SIGKILL)


def eventually(check, timeout_s=30.0, what="it"):
    """Poll until `check()` is true, and give its value; the limit only ends a test that hangs."""
    deadline = time.monotonic() + timeout_s
    while True:
        found = check()
        if found:
            return found
        assert time.monotonic() < deadline, f"{what} did not happen in {timeout_s:.0f} s"
        time.sleep(0.05)
