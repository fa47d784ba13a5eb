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
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from shoal.executors import keeper
from shoal.wire.regular_file import read_regular

DEFAULT_GRACE_S = 10.0
"""Of a worker whose file `started` is missing."""
# A number beyond these bounds was not written by a keeper, and would not fit where it goes.
Pid = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Ticks = Annotated[int, Meta(ge=0, le=2**62)]
Seconds = Annotated[float, Meta(ge=0, le=1e10)]
Text = Annotated[str, Meta(max_length=4096)]


LEAST_SET_S, MOST_SET_S = 0.005, 100 * 365 * 86400.0
"""No clock is wrong by more: a job may have written the file. Less is the time between two readings."""


class Started(msgspec.Struct, frozen=True):
    """The file `started`."""

    pid: Pid
    start_time: Ticks | None
    keeper_pid: Pid
    keeper_start_time: Ticks | None
    grace_s: Seconds = DEFAULT_GRACE_S
    #: The clock of its time stamps minus the clock of this boot. Keepers of earlier versions do not write it.
    wall_offset_s: Annotated[float, Meta(ge=-1e10, le=1e10)] | None = None
    boot: Text = ""


class Ended(msgspec.Struct, frozen=True):
    """The file `exit`."""

    code: Annotated[int, Meta(ge=0, le=255)] | None
    signal: Text | None
    why: Text
    told: bool
    steady_s: Seconds  # so it ended at most as long ago as this machine runs
    boot: Text
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
        return msgspec.json.decode(read_regular(path), type=form)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return None


def read_started(directory: Path) -> Started | None:
    return _read(directory / "started", Started)


def grace_of(directory: Path) -> float:
    started = read_started(directory)
    return DEFAULT_GRACE_S if started is None else started.grace_s


def read_ended(directory: Path) -> Ended | None:
    return _read(directory / "exit", Ended)


def stamps_ahead_s(directory: Path) -> float:
    """By how much the clock that stamped a worker's output is ahead of the clock of this boot.

    If that is not known, the wall clock of this machine is taken: the output is of an earlier boot or version.
    """
    recorded_s = _recorded_offset_s(directory)
    return time.time() - keeper.boot_clock_s() if recorded_s is None else recorded_s


def _recorded_offset_s(directory: Path) -> float | None:
    started = read_started(directory)
    return started.wall_offset_s if started is not None and started.boot == keeper.boot_id() else None


def clock_set_s(directory: Path) -> float:
    """By how much this machine's wall clock was set forward since the keeper in this directory began to stamp lines.

    0 for a copy of output that a keeper elsewhere has stamped.
    """
    recorded_s = _recorded_offset_s(directory)
    if recorded_s is None:
        return 0.0
    set_s = time.time() - keeper.boot_clock_s() - recorded_s
    return set_s if LEAST_SET_S <= abs(set_s) <= MOST_SET_S else 0.0


def open_keeper(directory: Path) -> int | None:
    """A pidfd of the keeper of the worker in this directory, if it lives.

    A living keeper has the lock open. The file `started` says which process that is. If a job has changed or removed
    it, all processes of this machine are looked at.
    """
    started = read_started(directory)
    if started is not None and (pidfd := _open_holder(started.keeper_pid, directory)) is not None:
        return pidfd
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            pidfd = _open_holder(int(name), directory)
            if pidfd is not None:
                return pidfd
    return None


def _open_holder(pid: int, directory: Path) -> int | None:
    """A pidfd of this process, if it has the lock of this directory open."""
    lock = os.path.realpath(directory / "lock")
    with contextlib.suppress(OSError):
        pidfd = os.pidfd_open(pid)
        if lock in open_files(pid):  # looked up while the pidfd keeps the pid from being used again
            return pidfd
        os.close(pidfd)
    return None


def open_files(pid: int | str) -> list[str]:
    """The paths of the files that a process has open; none if it has ended or belongs to somebody else."""
    files: list[str] = []
    with contextlib.suppress(OSError):
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                files.append(os.readlink(f"/proc/{pid}/fd/{fd}"))
    return files


def is_kept(directory: Path) -> bool:
    """Whether the keeper of the worker in this directory lives."""
    try:
        fd = os.open(directory / "lock", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False
