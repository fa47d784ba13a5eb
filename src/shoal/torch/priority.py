"""Leaving the cores to those who go on training."""

from __future__ import annotations

import contextlib
import os

LAST = 19


def step_back() -> None:
    """For a process that has only to end: freeing its memory must not slow the others' next step."""
    with contextlib.suppress(OSError):
        for thread in os.listdir("/proc/self/task"):
            os.setpriority(os.PRIO_PROCESS, int(thread), LAST)
    with contextlib.suppress(OSError), open("/proc/self/autogroup", "w") as file:
        file.write(str(LAST))  # where the kernel shares the cores between sessions, it asks the session
