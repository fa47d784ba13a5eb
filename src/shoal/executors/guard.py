"""Keeps jobs from escaping their keepers: a job may stop or kill its keeper, which runs under the same account.

- A keeper that was stopped is continued.
- A keeper is told again whether its worker shall stand still once it has taken in all that it was told before.
- A keeper that does not end its worker in time after it was told to is killed, with all processes below it.
- When a keeper was killed, the processes that it kept are killed: those of the worker's control group, those that were
  below the keeper when the guard looked last, and those that carry the worker's mark (`orphans`).

Without control groups, and of a job that may leave its own, a process escapes if it clears its environment and the
keeper is killed within `INTERVAL_S` after it was started, or while nobody guards.
"""

from __future__ import annotations

import contextlib
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path

from shoal.executors import cgroups, keeper
from shoal.executors.orphans import kill_orphans

INTERVAL_S = 1.0
#: The later one counts.
SUSPEND_AND_WAKE = frozenset({signal.SIGUSR1, signal.SIGUSR2})
PATIENCE_S = 5.0
"""How long a keeper may take beyond the worker's grace period."""


@dataclass(slots=True)
class Guarded:
    """One worker and its keeper."""

    directory: Path
    pid: int  # of the keeper
    pidfd: int
    grace_s: float
    cgroup: Path | None
    #: When the keeper is killed if it has not ended (of time.monotonic).
    kill_at_s: float | None = None
    #: Processes below the keeper at the last look, with their start times.
    below: dict[int, int] = field(default_factory=dict)
    #: Whether the worker shall stand still (USR1) or go on (USR2), until the keeper has certainly heard it.
    wanted: int | None = None

    def told_to_end(self, *, kill: bool) -> None:
        at_s = time.monotonic() + PATIENCE_S + (0.0 if kill else self.grace_s)
        self.kill_at_s = at_s if self.kill_at_s is None else min(self.kill_at_s, at_s)

    def end(self) -> None:
        """Tell the keeper to end its worker, and give it as long as the worker has."""
        self.told_to_end(kill=False)
        self._signal(signal.SIGTERM)

    def tell(self, number: int) -> None:
        """Send the keeper a signal. Of two that wait for it, it gets the lower one first, whichever was sent last."""
        if number in SUSPEND_AND_WAKE:
            self.wanted = number
        self._signal(number)

    def look(self, children: keeper.Children | None = None) -> None:
        """Continue a stopped keeper, and kill one that does not do what it was told.

        `children`: of all processes, if they are known. To read them takes milliseconds.
        """
        # Also with a control group: a job that may write to another group, as root may, can move processes there.
        below = _with_start_times(keeper.descendants(self.pid, children))
        if keeper.start_time(self.pid) is not None:  # else its processes have another parent by now
            self.below = below
        if _is_stopped(self.pid):
            self._signal(signal.SIGCONT)
        if self.wanted is not None and not _pending(self.pid).intersection(SUSPEND_AND_WAKE):
            self._signal(self.wanted)
            self.wanted = None
        if self.kill_at_s is not None and time.monotonic() >= self.kill_at_s:
            self.below |= _with_start_times(_freeze(self.pid))
            self._signal(signal.SIGKILL)

    def clean_up(self) -> None:
        """The keeper has ended: kill what it left behind."""
        if self.cgroup is not None:
            cgroups.kill(self.cgroup)
        for pid, start_time in self.below.items():
            if keeper.start_time(pid) == start_time:
                keeper.send_signal([*_freeze(pid), pid], signal.SIGKILL)
        kill_orphans(self.directory)

    def is_clean(self) -> bool:
        if self.cgroup is None:
            return True
        if not cgroups.is_empty(self.cgroup):
            return False
        cgroups.remove(self.cgroup)
        return True

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, number)


def _with_start_times(pids: list[int]) -> dict[int, int]:
    found = {pid: keeper.start_time(pid) for pid in pids}
    return {pid: start_time for pid, start_time in found.items() if start_time is not None}


def _freeze(root: int) -> list[int]:
    """Stop all processes below `root` until none is new: a stopped process cannot start others."""
    stopped: list[int] = []
    for _ in range(20):
        new = [pid for pid in keeper.descendants(root) if pid not in stopped]
        if not new:
            break
        keeper.send_signal(new, signal.SIGSTOP)
        stopped += new
    return stopped


def _is_stopped(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            stat = file.read()
    except OSError:
        return False
    return stat[stat.rindex(b")") + 2 :].split()[0] == b"T"


def _pending(pid: int) -> set[int]:
    """The signals that were sent to a process and have not reached it: it blocks them, or is stopped."""
    found = 0
    with contextlib.suppress(OSError), open(f"/proc/{pid}/status") as file:
        for line in file:
            if line.startswith(("SigPnd:", "ShdPnd:")):
                found |= int(line.split()[1], 16)
    return {number for number in range(1, 65) if found >> (number - 1) & 1}


def pid_of(pidfd: int) -> int:
    """The process that a pidfd refers to."""
    with open(f"/proc/self/fdinfo/{pidfd}") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("Pid:"))
