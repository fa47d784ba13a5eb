"""What a keeper leaves on disk: that it lives, what it started, and how that ended.

A job that runs under the keeper's account can write these files. So nothing that is read here is taken on trust: a file
of another form counts as missing.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from pathlib import Path
from typing import TypeVar

import msgspec

from shoal.executors import keeper


class Started(msgspec.Struct, frozen=True):
    """The file `started`."""

    pid: int
    start_time: int | None
    keeper_pid: int
    keeper_start_time: int | None
    grace_s: float = 10.0
    #: The clock of its time stamps minus the clock of this boot. Keepers of earlier versions do not write it.
    wall_offset_s: float | None = None
    boot: str = ""


class Ended(msgspec.Struct, frozen=True):
    """The file `exit`."""

    code: int | None
    signal: str | None
    why: str
    told: bool
    steady_s: float
    boot: str
    #: The keeper killed it because the lease of its node had ended.
    lease_ended: bool = False

    @property
    def ago_s(self) -> float | None:
        """How long ago it ended. None if that was before the last boot."""
        same_boot = self.boot and self.boot == keeper.boot_id()
        return max(time.monotonic() - self.steady_s, 0.0) if same_boot else None


_File = TypeVar("_File", Started, Ended)


def _read(path: Path, form: type[_File]) -> _File | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=form)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return None


def read_started(directory: Path) -> Started | None:
    return _read(directory / "started", Started)


def read_ended(directory: Path) -> Ended | None:
    return _read(directory / "exit", Ended)


def stamps_ahead_s(directory: Path) -> float:
    """By how much the clock that stamped a worker's output is ahead of the clock of this boot.

    If that is not known, the wall clock of this machine is taken: the output is of an earlier boot or version.
    """
    started = read_started(directory)
    if started is not None and started.wall_offset_s is not None and started.boot == keeper.boot_id():
        return started.wall_offset_s
    return time.time() - keeper.boot_clock_s()


def open_keeper(started: Started) -> int | None:
    """A pidfd of the keeper that wrote `started`, if it still runs."""
    with contextlib.suppress(OSError, OverflowError):
        pidfd = os.pidfd_open(started.keeper_pid)
        if keeper.start_time(started.keeper_pid) == started.keeper_start_time:
            return pidfd
        os.close(pidfd)
    return None


def is_kept(directory: Path) -> bool:
    """Whether the keeper of the worker in this directory lives."""
    try:
        fd = os.open(directory / "lock", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False
