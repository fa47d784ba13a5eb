"""The keeper's side of sessions: commands that people run next to its worker. Standard library only.

The keeper listens on a socket in the worker's directory, which nobody else can enter. A connection is one session:

    request    b"start" with three open files: the command (JSON: command, env, tty), its input, its output
    answer     JSON: code (how it ended, as a shell says it), why (if it could not start)

The command becomes a child of the keeper, with the worker's account, control group, directory and variables. So it is
suspended, continued and ended with the worker, whoever asked for it and whatever has become of them. It is killed when
its connection closes.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import selectors
import signal
import socket
import struct
import subprocess
import termios

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any

NAME = "sessions"
MOST = 32


class SessionPort:
    def __init__(
        self,
        spec: dict[str, Any],
        selector: selectors.BaseSelector,
        prepare: Callable[[], None],
        give: Callable[[int, dict[str, Any]], None],
        kill: Callable[[int], None],
        why_not: Callable[[], str],
    ) -> None:
        """`prepare` runs in the new process, `give` lets its account open a file by name, `kill` ends the processes
        below one and itself, `why_not` says why no session may begin now."""
        self.spec, self.selector = spec, selector
        self.prepare, self.give, self.kill, self.why_not = prepare, give, kill, why_not
        #: By the pid of the command.
        self.open: dict[int, socket.socket] = {}

    def listen(self, directory: str) -> None:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        at = os.open(directory, os.O_PATH | os.O_CLOEXEC)
        try:  # the path of a socket must be short, and that of the directory may not be
            with contextlib.suppress(FileNotFoundError):
                os.unlink(NAME, dir_fd=at)
            listener.bind(f"/proc/self/fd/{at}/{NAME}")
        finally:
            os.close(at)
        listener.listen(MOST)
        self.selector.register(listener, selectors.EVENT_READ, lambda: self.accept(listener))

    def end(self, directory: str) -> None:
        with contextlib.suppress(OSError):
            os.unlink(os.path.join(directory, NAME))

    def accept(self, listener: socket.socket) -> None:
        connection, _ = listener.accept()
        connection.setblocking(False)
        size = struct.calcsize("3i")
        _, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
        if uid not in (0, os.geteuid()) or len(self.open) >= MOST:
            connection.close()
            return
        self.selector.register(connection, selectors.EVENT_READ, lambda: self.received(connection))

    def received(self, connection: socket.socket) -> None:
        """A request, or the end of the connection."""
        try:
            body, fds, _, _ = socket.recv_fds(connection, 16, 3)
        except BlockingIOError:
            return
        except OSError:
            body, fds = b"", []
        try:
            if body == b"start" and len(fds) == 3 and connection not in self.open.values():
                self.start(connection, *fds)
                return
        finally:
            for fd in fds:
                os.close(fd)
        for pid in [pid for pid, of in self.open.items() if of is connection]:
            del self.open[pid]
            self.kill(pid)
        self.close(connection)

    def start(self, connection: socket.socket, spec_fd: int, in_fd: int, out_fd: int) -> None:
        why, code = self.why_not(), 126
        command = ["?"]
        try:
            with open(spec_fd, closefd=False) as file:
                request = json.load(file)
            command = list(request["command"])
            if not why:
                self.open[self.popen(request, in_fd, out_fd)] = connection
                return
        except OSError as error:
            code = 127 if isinstance(error, FileNotFoundError) else 126
            why = f"cannot start {command[0]!r}: {error.strerror}"
        except (ValueError, KeyError, TypeError, IndexError, subprocess.SubprocessError):
            why = f"cannot start {command[0]!r}: its account may not start in this directory"
        self.answer(connection, code, why)

    def popen(self, request: dict[str, Any], in_fd: int, out_fd: int) -> int:
        def prepare() -> None:
            if request["tty"]:
                fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # Ctrl-C reaches the command
            self.prepare()

        for fd in {in_fd, out_fd} if request["tty"] else {out_fd}:
            self.give(fd, self.spec)
        child = subprocess.Popen(
            request["command"],
            cwd=self.spec["workdir"] if self.spec.get("account") is None else "/",  # `prepare` goes there
            env=self.spec["env"] | request["env"],
            stdin=in_fd,
            stdout=out_fd,
            stderr=out_fd,
            start_new_session=True,
            preexec_fn=prepare,
        )
        child.returncode = 0  # the keeper waits for it: Popen must not
        return child.pid

    def ended(self, pid: int, status: int) -> None:
        """A child of the keeper has ended. It may be the command of a session."""
        connection = self.open.pop(pid, None)
        if connection is not None:
            code = os.waitstatus_to_exitcode(status)
            self.answer(connection, code if code >= 0 else 128 - code, "")

    def answer(self, connection: socket.socket, code: int, why: str) -> None:
        with contextlib.suppress(OSError):
            connection.send(json.dumps({"code": code, "why": why[:1000]}).encode())
        self.close(connection)

    def close(self, connection: socket.socket) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self.selector.unregister(connection)
        connection.close()


def kill_below(pid: int, below: Callable[[int], Iterable[int]]) -> None:
    """Kill a process and all below it. Those are stopped first: a stopped process cannot start others."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGSTOP)
    for each in [*below(pid), pid]:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(each, signal.SIGKILL)
