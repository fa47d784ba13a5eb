"""Processes of a worker whose keeper was killed: found by a mark in their environment, and ended.

The mark is a random word in the worker's directory and in the environment of all its processes.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import signal
from collections.abc import Iterator
from pathlib import Path

from shoal.wire.regular_file import read_regular, write_new

MARK = "SHOAL_MARK"
MARK_BYTES = 16
END_S = 2.0
"""How long a killed process may take to end. It usually takes milliseconds."""


def new_mark(directory: Path) -> str:
    """Make a mark for the worker in this directory and record it there."""
    mark = secrets.token_hex(MARK_BYTES)
    write_new(directory / "mark", mark)
    return mark


def kill_orphans(directory: Path) -> None:
    """Kill the processes that carry the mark of the worker in this directory."""
    try:
        text = read_regular(directory / "mark").decode()
    except (OSError, ValueError):  # a job under this account may have changed it
        return
    if len(text) < 2 * MARK_BYTES:
        return
    entry = f"{MARK}={text}".encode()
    for _ in range(10):  # repeat until none is found: a process may have forked meanwhile
        found = list(_marked(entry))
        if not found:
            return
        for pid in found:
            _kill(pid, entry)


def _marked(entry: bytes) -> Iterator[int]:
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and int(process.name) != os.getpid():
            with contextlib.suppress(OSError):
                if entry in (process / "environ").read_bytes().split(b"\0"):
                    yield int(process.name)


def _kill(pid: int, entry: bytes) -> None:
    with contextlib.suppress(OSError):
        pidfd = os.pidfd_open(pid)
        try:
            # Check again now that the pidfd refers to one process: the pid cannot be reused any more.
            if entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                select.select([pidfd], [], [], END_S)
        finally:
            os.close(pidfd)
