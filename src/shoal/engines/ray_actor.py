"""The actor that runs the agent command on a node of Ray. This module does not import Ray."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import stat
import subprocess
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

STOP_GRACE_S = 10.0
AGAIN_S = 1.0
"""How long to wait before a killed agent is started again."""
LAST_WORDS_S = 1.0
"""How long to wait for the rest of what an agent printed that has ended."""
LONGEST_WORDS = 300
PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def _end_with_parent() -> None:
    """Runs in the child: the kernel sends it SIGTERM when the actor's thread ends, however that ends."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


@dataclass(frozen=True, slots=True)
class Task:
    """What the actor runs. `told` are further variables of the environment."""

    home: str
    actor: str
    agent: str
    node: str
    gpus: int
    argv: tuple[str, ...]
    env: Mapping[str, str]
    files: Mapping[str, bytes]
    told: Mapping[str, str]


class AgentActor:
    """Runs the agent command as a child process, again if it was killed. Ray restarts the actor itself if it dies."""

    def __init__(self, task: Task) -> None:
        self._gpus = task.gpus
        self._dir = Path(tempfile.mkdtemp(prefix="shoal-agent."))
        self._ended: str | None = None
        self._stopping = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        try:
            self._state = _private_directory(task.home, task.agent)
            for file, data in task.files.items():
                descriptor = os.open(self._dir / file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
                with os.fdopen(descriptor, "wb") as out:
                    out.write(data)
        except OSError as error:
            self._ended = f"cannot prepare the agent: {error}"
            return
        told = {"SHOAL_ENGINE": "ray", "SHOAL_ENGINE_ID": task.actor, "SHOAL_NODE": task.node}
        told["SHOAL_LEAVING_FILE"] = str(self._dir / "leaving")
        values = {
            "{dir}": str(self._dir),
            "{state}": str(self._state),
            "{agent}": task.agent,
            "{node}": task.node,
        }
        command = [_fill(argument, values) for argument in task.argv]
        env = {**os.environ, **task.told, **task.env, **told}
        self._keeper = threading.Thread(target=self._keep, args=(command, env), daemon=True)
        self._keeper.start()

    def _keep(self, command: list[str], env: dict[str, str]) -> None:
        """Runs in a thread of its own, which starts the command and lives as long as the actor."""
        while not self._stopping.is_set():
            try:
                self._process = subprocess.Popen(
                    command,
                    env=env,
                    stdin=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    start_new_session=True,
                    preexec_fn=_end_with_parent,
                )
            except OSError as error:
                self._ended = f"cannot start {command[0]}: {error.strerror or error}"
                return
            words = _LastWords(self._process)
            code = self._process.wait()
            if code >= 0:
                self._ended = f"the agent command ended: exit code {code}{words.after_its_end()}"
                return
            self._stopping.wait(AGAIN_S)

    def status(self) -> dict[str, Any]:
        """Whether the agent command runs, and if not, how it ended."""
        return {"gpus": self._gpus, "ended": self._ended}

    def stop(self) -> None:
        """End the agent command."""
        self._stopping.set()
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()
            self._keeper.join(STOP_GRACE_S)
            if self._keeper.is_alive():
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)
                self._keeper.join()
        shutil.rmtree(self._dir, ignore_errors=True)
        if self._ended is None or self._process is not None:
            shutil.rmtree(self._state, ignore_errors=True)


class _LastWords:
    """Passes the standard error of a process on to that of this one, and remembers the last line that is not empty."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stderr is not None
        self._line = ""
        self._thread = threading.Thread(target=self._pass_on, args=(process.stderr,), daemon=True)
        self._thread.start()

    def _pass_on(self, stream: IO[bytes]) -> None:
        with stream:
            for line in stream:
                with contextlib.suppress(OSError):
                    os.write(2, line)
                text = "".join(c for c in line.decode(errors="replace") if c.isprintable()).strip()
                self._line = text[:LONGEST_WORDS] or self._line

    def after_its_end(self) -> str:
        """With a colon before it. Processes that the agent left behind may keep the stream open."""
        self._thread.join(LAST_WORDS_S)
        return f": {self._line}" if self._line else ""


def _private_directory(home: str, agent: str) -> Path:
    """A directory that an actor of the same home finds again on this node, also after Ray has restarted there."""
    top = Path(tempfile.gettempdir(), f"shoal-agents-{os.getuid()}")
    for path in (top, top / home, top / home / agent):
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
        found = path.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
            raise OSError(f"{path} exists and is not a private directory of this user: remove it")
    return top / home / agent


def _fill(argument: str, values: Mapping[str, str]) -> str:
    for placeholder, value in values.items():
        argument = argument.replace(placeholder, value)
    return argument
