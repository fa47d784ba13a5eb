"""The clock of slurmctld. The times that Slurm tells are in it, and the clock of this machine may be wrong."""

from __future__ import annotations

import re
import time

#: How long one reading is used. Meanwhile, the monotonic clock tells what has passed.
FRESH_S = 60.0


class ControllerClock:
    """Until it was read, and if sdiag does not tell the time, it is taken to agree with this machine's clock."""

    def __init__(self) -> None:
        #: The controller's wall clock minus that of this machine, at the last reading.
        self.ahead_s: float | None = None
        #: What `time.monotonic` would tell at the controller's Unix time 0.
        self._zero_s = time.monotonic() - time.time()
        self._read_s = float("-inf")

    @property
    def is_fresh(self) -> bool:
        return time.monotonic() - self._read_s < FRESH_S

    def read(self, sdiag: str) -> None:
        """Take the time from the output of sdiag."""
        self._read_s = time.monotonic()
        found = re.search(r"^sdiag output at\b.*?\b(\d{9,})\b", sdiag, re.MULTILINE)
        controller_s = float(found[1]) if found else time.time()
        self.ahead_s = controller_s - time.time() if found else None
        self._zero_s = self._read_s - controller_s

    def monotonic(self, controller_s: float) -> float:
        """A Unix time of the controller by `time.monotonic` of this process."""
        return self._zero_s + controller_s
