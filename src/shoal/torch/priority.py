"""Process priority of a worker that leaves."""

from __future__ import annotations

import contextlib
import os

LOW = 5
"""Low enough for the others' next step. At 19, a process takes ten seconds to end on a busy machine."""


def lower_priority() -> None:
    """For a process that only has to end: freeing its memory must not slow down the others' next step."""
    with contextlib.suppress(OSError):
        for thread in os.listdir("/proc/self/task"):
            os.setpriority(os.PRIO_PROCESS, int(thread), LOW)
    if os.getsid(0) == os.getpid():  # otherwise other processes of the session would become slow, too
        with contextlib.suppress(OSError), open("/proc/self/autogroup", "w") as file:
            file.write(str(LOW))  # with autogroups the kernel shares the cores between sessions first
