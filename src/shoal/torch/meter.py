"""Measurements: added up by the training thread with a few float additions, read by the control link's thread."""

from __future__ import annotations

import os
import time
from collections import deque
from typing import Any

from shoal.wire.messages import Report


def resident_bytes() -> int:
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


class Meter:
    def __init__(self) -> None:
        self.steps = 0
        self.samples = 0.0
        self.input_s = 0.0
        self.sync_s = 0.0
        self.busy_s = 0.0
        self.values: dict[str, Any] = {}
        self.notes: deque[str] = deque(maxlen=100)
        self.pauses: deque[tuple[int, float]] = deque(maxlen=100)
        self.saved: deque[tuple[str, int]] = deque(maxlen=10)
        self._before = (0, 0.0, 0.0, 0.0, 0.0)
        self._reported_s = time.monotonic()

    def report(self, **where: int) -> Report:
        """What was measured since the last report. Called off the training thread."""
        now, self._reported_s, before_s = time.monotonic(), time.monotonic(), self._reported_s
        new = (self.steps, self.samples, self.busy_s, self.sync_s, self.input_s)
        steps, samples, busy_s, sync_s, input_s = (a - b for a, b in zip(new, self._before))
        self._before = new
        values = {}
        for name, value in list(self.values.items()):
            try:
                values[name] = float(value)  # a tensor on a GPU is waited for here, not in the training loop
            except (TypeError, ValueError):
                continue
        pause = self.pauses.popleft() if self.pauses else (0, None)
        saved = self.saved.popleft() if self.saved else (None, 0)
        notes = tuple(self.notes.popleft() for _ in range(len(self.notes)))
        return Report(
            steps=int(steps),
            samples=samples,
            seconds=now - before_s,
            compute_s=max(0.0, busy_s - sync_s - input_s),
            sync_s=sync_s,
            input_s=input_s,
            memory_bytes=resident_bytes(),
            values=values,
            notes=notes,
            pause_generation=pause[0],
            pause_s=pause[1],
            saved=saved[0],
            saved_step=saved[1],
            **where,
        )
