"""A command that a person runs next to a worker, with or without a terminal."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
from typing import Any

from shoal.executors import session_child

MOST_KEPT_BYTES = 1024 * 1024
"""Output that is kept for a reader that is slow or reconnects. The command waits when it is full."""


class Session:
    """All calls on the event loop's thread. `output` is a window of the whole output, which begins at `begin`."""

    def __init__(
        self, spec: dict[str, Any], command: list[str], *, tty: bool, rows: int, columns: int
    ) -> None:
        self.output, self.begin = bytearray(), 0
        self.exit_code: int | None = None
        self.changed = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._process, self._fd, self._tty = _start(spec, command, tty, rows, columns)
        os.set_blocking(self._fd, False)
        self._open, self._reading = True, False
        self._read_on()
        self._waiting = asyncio.create_task(self._wait())

    def _read_on(self) -> None:
        if self._open and not self._reading and len(self.output) < MOST_KEPT_BYTES:
            self._loop.add_reader(self._fd, self._readable)
            self._reading = True

    def _readable(self) -> None:
        try:
            data = os.read(self._fd, 65536)
        except BlockingIOError:
            return
        except OSError:  # the last process has closed the terminal
            data = b""
        if data:
            self.output += data
        if not data or len(self.output) >= MOST_KEPT_BYTES:
            self._loop.remove_reader(self._fd)
            self._reading = False
            self._open = self._open and bool(data)
        self.changed.set()

    async def _wait(self) -> None:
        while self._process.poll() is None:
            await asyncio.sleep(0.02)
        code = self._process.returncode
        # What was printed just before the end is still to be read.
        for _ in range(50):
            if not self._open:
                break
            await asyncio.sleep(0.01)
        self.exit_code = code if code >= 0 else 128 - code
        self.changed.set()

    @property
    def is_open(self) -> bool:
        """Whether more output may come."""
        return self._open

    @property
    def is_over(self) -> bool:
        return self.exit_code is not None

    def take(self, after: int) -> bytes:
        """The output after this position. What comes before it is not needed again."""
        del self.output[: max(after - self.begin, 0)]
        self.begin = max(self.begin, after)
        self._read_on()
        return bytes(self.output)

    def write(self, data: bytes) -> None:
        if self._tty and not self.is_over:
            with contextlib.suppress(OSError):
                os.write(self._fd, data)

    def resize(self, rows: int, columns: int) -> None:
        if self._tty and not self.is_over:
            _set_size(self._fd, rows, columns)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        self.kill()
        self._waiting.cancel()
        if self._reading:
            self._loop.remove_reader(self._fd)
        with contextlib.suppress(OSError):
            os.close(self._fd)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1)


def _start(
    spec: dict[str, Any], command: list[str], tty: bool, rows: int, columns: int
) -> tuple[subprocess.Popen[bytes], int, bool]:
    if tty:
        ours, theirs = pty.openpty()
        _set_size(ours, rows, columns)
        inward = theirs
    else:
        ours, theirs = os.pipe2(os.O_CLOEXEC)
        inward = os.open(os.devnull, os.O_RDONLY)
    spec_fd = os.memfd_create("session", os.MFD_CLOEXEC)
    try:
        env = spec["env"] | ({"TERM": "xterm-256color"} if tty else {})
        os.write(spec_fd, json.dumps(spec | {"command": command, "env": env}).encode())
        os.lseek(spec_fd, 0, os.SEEK_SET)
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", session_child.__file__, str(spec_fd), "1" if tty else "0"],
            stdin=inward, stdout=theirs, stderr=theirs, pass_fds=(spec_fd,), start_new_session=True, env={}, cwd="/",
        )  # fmt: skip
    except BaseException:
        os.close(ours)
        raise
    finally:
        os.close(spec_fd)
        for fd in {inward, theirs}:
            os.close(fd)
    return process, ours, tty


def _set_size(fd: int, rows: int, columns: int) -> None:
    with contextlib.suppress(OSError):
        fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
