"""A command that a person runs next to a worker, with or without a terminal. The worker's keeper starts it."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import pty
import socket
import struct
import termios
from pathlib import Path
from typing import Any

from shoal.executors import session_port

MOST_KEPT_BYTES = 256 * 1024
"""Output that is kept for a reader that is slow. The command waits when it is full."""
MOST_TYPED_BYTES = 1024 * 1024
"""Input that the command has not read yet. More is dropped."""
LAST_S, LOOK_S = 0.5, 0.01
"""Processes that a command leaves behind may keep its output open: it is read so long after the last of it."""


class SessionError(Exception):
    """The command cannot be started. The message says why."""


class Session:
    """All calls on the event loop's thread. `directory` is the worker's."""

    def __init__(self, directory: Path, command: list[str], *, tty: bool, rows: int, columns: int) -> None:
        self.exit_code: int | None = None
        self.why = ""
        self.changed = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._kept, self._typed, self._seen = bytearray(), bytearray(), 0
        self._tty = tty
        self._keeper, self._fd = _start(directory, command, tty, rows, columns)
        self._open, self._reading = True, False
        self._read_on()
        self._loop.add_reader(self._keeper, self._keeper_says)
        self._ending: asyncio.Task[None] | None = None

    # Output

    def _read_on(self) -> None:
        if self._open and not self._reading and len(self._kept) < MOST_KEPT_BYTES:
            self._loop.add_reader(self._fd, self._readable)
            self._reading = True

    def _readable(self) -> None:
        try:
            data = os.read(self._fd, 65536)
        except BlockingIOError:
            return
        except OSError:  # the last process has closed the terminal
            data = b""
        self._kept += data
        self._seen += len(data)
        self._open = self._open and bool(data)
        if not data or len(self._kept) >= MOST_KEPT_BYTES:
            self._loop.remove_reader(self._fd)
            self._reading = False
        self.changed.set()

    def take(self, most_bytes: int) -> bytes:
        """Some output that was not taken yet."""
        data = bytes(self._kept[:most_bytes])
        del self._kept[:most_bytes]
        self._read_on()
        return data

    @property
    def is_over(self) -> bool:
        """Whether it has ended and all its output was taken."""
        return self.exit_code is not None and not self._kept

    # The end

    def _keeper_says(self) -> None:
        try:
            text = self._keeper.recv(4096)
        except BlockingIOError:
            return
        except OSError:
            text = b""
        self._loop.remove_reader(self._keeper)
        # Without an answer, the keeper has ended: it has killed everything.
        said: dict[str, Any] = json.loads(text or '{"code": 137, "why": "the worker has ended"}')
        self._ending = self._loop.create_task(self._end(said["code"], said["why"]))

    async def _end(self, code: int, why: str) -> None:
        """Note how it ended, when what was printed just before was read."""
        quiet_s = 0.0
        while self._open and quiet_s < LAST_S:
            seen = self._seen
            await asyncio.sleep(LOOK_S)
            quiet_s = quiet_s + LOOK_S if self._reading and self._seen == seen else 0.0
        self.exit_code, self.why = code, why
        self.changed.set()

    # Input

    def write(self, data: bytes) -> None:
        if not self._tty or not self._open or len(self._typed) + len(data) > MOST_TYPED_BYTES:
            return
        if not self._typed:
            self._loop.add_writer(self._fd, self._writable)
        self._typed += data

    def _writable(self) -> None:
        try:
            del self._typed[: os.write(self._fd, self._typed)]
        except BlockingIOError:
            return
        except OSError:  # its terminal is closed
            self._typed.clear()
        if not self._typed:
            self._loop.remove_writer(self._fd)

    def resize(self, rows: int, columns: int) -> None:
        if self._tty and self._open:
            _set_size(self._fd, rows, columns)

    def close(self) -> None:
        """End the command. Its keeper kills it when the connection closes."""
        if self._keeper.fileno() < 0:
            return
        if self._ending is not None:
            self._ending.cancel()
        self._loop.remove_reader(self._keeper)
        self._loop.remove_reader(self._fd)
        self._loop.remove_writer(self._fd)
        self._open = self._reading = False
        self._keeper.close()
        with contextlib.suppress(OSError):
            os.close(self._fd)


def _start(
    directory: Path, command: list[str], tty: bool, rows: int, columns: int
) -> tuple[socket.socket, int]:
    """Ask the keeper. Return the connection to it and our end of the terminal, or of the output."""
    keeper = _connect(directory)
    if tty:
        ours, theirs = pty.openpty()
        _set_size(ours, rows, columns)
        inward = theirs
    else:
        ours, theirs = os.pipe2(os.O_CLOEXEC)
        inward = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    request = {"command": command, "env": {"TERM": "xterm-256color"} if tty else {}, "tty": tty}
    spec = os.memfd_create("session", os.MFD_CLOEXEC)
    try:
        os.write(spec, json.dumps(request).encode())
        os.lseek(spec, 0, os.SEEK_SET)
        socket.send_fds(keeper, [b"start"], [spec, inward, theirs])
    except OSError as error:
        keeper.close()
        os.close(ours)
        raise SessionError(f"its keeper does not answer: {error.strerror}") from None
    finally:
        for fd in {spec, inward, theirs}:
            os.close(fd)
    os.set_blocking(ours, False)
    return keeper, ours


def _connect(directory: Path) -> socket.socket:
    keeper = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
    try:
        at = os.open(directory, os.O_PATH | os.O_CLOEXEC)
        try:  # the path of a socket must be short
            keeper.connect(f"/proc/self/fd/{at}/{session_port.NAME}")
        finally:
            os.close(at)
    except OSError as error:
        keeper.close()
        if isinstance(error, FileNotFoundError | ConnectionRefusedError):
            raise SessionError("it has ended, or an earlier version of Shoal started it") from None
        raise SessionError(f"its keeper does not answer: {error.strerror}") from None
    return keeper


def _set_size(fd: int, rows: int, columns: int) -> None:
    with contextlib.suppress(OSError):
        fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
