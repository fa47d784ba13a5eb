"""This terminal as the terminal of a command next to a worker."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import struct
import sys
import termios
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from shoal.cli.out import say

if TYPE_CHECKING:
    from shoal.client import Client
    from shoal.server.api.models import JobSpec


def attach(client: Client, job: int, command: Sequence[str], *, rank: int | None, tty: bool) -> int:
    """Run the command, show its output, and return its exit code. With `tty`, keys go to it, also Ctrl-C."""
    size = _size()
    session = client.exec_start(job, command, rank=rank, tty=tty, rows=size.lines, columns=size.columns)
    ended = threading.Event()
    try:
        with _raw() if tty else contextlib.nullcontext():
            if tty:
                _send_keys(client, session, ended)
            code = _show(client, session)
        if not tty and _unread_bytes():
            say("shoal: standard input was not passed on to the command; -t passes it on, as a terminal does")
        return code
    except KeyboardInterrupt:
        return 130
    finally:
        ended.set()
        with contextlib.suppress(Exception):  # it has ended already
            client.exec_end(session)


def _unread_bytes() -> int:
    """What a pipe or file as standard input still has. A terminal, or none, counts as empty."""
    try:
        if os.isatty(0):
            return 0
        return int(struct.unpack("i", fcntl.ioctl(0, termios.FIONREAD, struct.pack("i", 0)))[0])
    except OSError:
        return 0


def run_interactive(client: Client, spec: JobSpec) -> int:
    """Submit a job that holds GPUs, and run its command in this terminal. The job ends with it."""
    import uuid

    from shoal.cli.follow import exit_code, show_states

    job = client.submit(spec, idempotency_key=uuid.uuid4().hex)
    say(f"submitted {job.name} (job {job.id})")
    try:
        job = show_states(client, job)
        if job.state.is_final:
            say(f"{job.name}: {job.state.value}{f': {job.message}' if job.message else ''}")
            return exit_code(job)
        return attach(client, job.id, spec.command, rank=None, tty=True)
    finally:
        with contextlib.suppress(Exception):  # it has ended already
            client.cancel(job.id)


def _show(client: Client, session: str) -> int:
    position = 0
    while True:
        data, position, code = client.exec_output(session, position)
        if data:
            sys.stdout.buffer.write(data)
            sys.stdout.buffer.flush()
        if code is not None:
            return code


def _send_keys(client: Client, session: str, ended: threading.Event) -> None:
    def resized(*_: object) -> None:
        size = _size()
        with contextlib.suppress(Exception):
            client.exec_size(session, size.lines, size.columns)

    def read() -> None:
        while not ended.is_set():
            data = os.read(0, 4096)
            with contextlib.suppress(Exception):  # it has ended meanwhile
                client.exec_input(session, data or b"\x04")  # at its end, the key that ends an input
            if not data:
                return

    signal.signal(signal.SIGWINCH, resized)
    threading.Thread(target=read, daemon=True).start()


def _size() -> os.terminal_size:
    """Of the terminal itself: LINES and COLUMNS may be of another. A terminal that nobody sees may have none."""
    try:
        found = os.get_terminal_size(0)
    except OSError:
        found = shutil.get_terminal_size()
    return found if found.lines and found.columns else os.terminal_size((80, 24))


@contextlib.contextmanager
def _raw() -> Iterator[None]:
    """Pass keys on as they are typed, and restore the terminal afterwards."""
    if not sys.stdin.isatty():
        yield
        return
    import tty

    before = termios.tcgetattr(0)
    try:
        tty.setraw(0, termios.TCSADRAIN)  # keeps what was typed before the command began
        yield
    finally:
        termios.tcsetattr(0, termios.TCSADRAIN, before)
