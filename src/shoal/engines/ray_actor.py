"""The actor that runs the agent command on a node of Ray. This module does not import Ray."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

STOP_GRACE_S = 10.0
PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def _end_with_parent() -> None:
    """Runs in the child: the kernel sends it SIGTERM when the actor's process ends, however that ends."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


class AgentActor:
    """Runs the agent command as a child process. Ray restarts the actor, and so the command, if it dies."""

    def __init__(
        self,
        name: str,
        node: str,
        gpus: int,
        argv: tuple[str, ...],
        env: Mapping[str, str],
        files: Mapping[str, bytes],
    ) -> None:
        self._gpus = gpus
        self._dir = Path(tempfile.mkdtemp(prefix="shoal-agent."))
        for file, data in files.items():
            descriptor = os.open(self._dir / file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "wb") as out:
                out.write(data)
        told = {"SHOAL_ENGINE": "ray", "SHOAL_ENGINE_ID": name, "SHOAL_MACHINE": name, "SHOAL_NODE": node}
        told["SHOAL_LEAVING_FILE"] = str(self._dir / "leaving")
        values = {"{dir}": str(self._dir), "{machine}": name, "{node}": node}
        command = [_fill(argument, values) for argument in argv]
        self._failure = ""
        self._process: subprocess.Popen[bytes] | None = None
        try:
            self._process = subprocess.Popen(
                command,
                env={**os.environ, **env, **told},
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )
        except OSError as error:
            self._failure = f"cannot start {command[0]}: {error.strerror or error}"

    def status(self) -> dict[str, Any]:
        """Whether the agent command runs, and if not, how it ended."""
        if self._process is None:
            return {"gpus": self._gpus, "ended": self._failure}
        code = self._process.poll()
        if code is None:
            return {"gpus": self._gpus, "ended": None}
        how = f"exit code {code}" if code >= 0 else f"signal {-code}"
        return {"gpus": self._gpus, "ended": f"the agent command ended: {how}"}

    def stop(self) -> None:
        """End the agent command."""
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(STOP_GRACE_S)
            except subprocess.TimeoutExpired:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
        shutil.rmtree(self._dir, ignore_errors=True)


def _fill(argument: str, values: Mapping[str, str]) -> str:
    for placeholder, value in values.items():
        argument = argument.replace(placeholder, value)
    return argument
