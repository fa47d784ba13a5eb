"""The clock of slurmctld. The times that Slurm tells are in it, and the clock of this machine may be wrong."""

from __future__ import annotations

import re
import time

#: How long one reading is used. Meanwhile, the monotonic clock tells what has passed.
FRESH_S = 60.0


class ControllerClock:
    """Until it was read for the first time, it is taken to agree with this machine's clock."""

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
        """Take the time from the output of sdiag. If it does not tell the time, the last reading stays in use."""
        self._read_s = time.monotonic()
        found = re.search(r"^sdiag output at\b.*?\b(\d{9,})\b", sdiag, re.MULTILINE)
        if found:
            self.ahead_s = float(found[1]) - time.time()
            self._zero_s = self._read_s - float(found[1])

    def monotonic(self, controller_s: float) -> float:
        """A Unix time of the controller by `time.monotonic` of this process."""
        return self._zero_s + controller_s
