"""Measurements: summed by the training thread with a few float additions, read by the control link's thread.

Reports cover whole steps: what an unfinished step has used so far is reported with that step.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

from shoal.wire.messages import Report


def resident_bytes() -> int:
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over all finished steps, and the time at which the last one ended."""

    steps: int
    samples: float
    busy_s: float
    sync_s: float
    input_s: float
    at_s: float


log = logging.getLogger("shoal.torch")


class Meter:
    def __init__(self) -> None:
        self.input_s = 0.0
        self.sync_s = 0.0
        self._done: Totals | None = None
        self._reported: Totals | None = None
        self.values: dict[str, Any] = {}
        self.notes: deque[str] = deque(maxlen=100)
        #: Under a server, whose `shoal logs` shows what workers print.
        self.prints = "SHOAL_USER" in os.environ
        self.pauses: deque[tuple[int, float]] = deque(maxlen=100)
        self.saved: deque[tuple[str, int]] = deque(maxlen=10)

    def note(self, text: str) -> None:
        """A line for the job's log."""
        log.info(text)
        self.notes.append(text)
        if self.prints:
            print(f"shoal: {text}", file=sys.stderr, flush=True)

    def step_done(self, samples: int, began_s: float) -> None:
        """At the end of a step that began at `began_s` (of perf_counter)."""
        now_s, before = time.perf_counter(), self._done
        if before is None:
            before = self._reported = Totals(0, 0.0, 0.0, 0.0, 0.0, began_s)
        # One assignment: the reporting thread sees all of a step or nothing.
        self._done = Totals(
            before.steps + 1,
            before.samples + samples,
            before.busy_s + now_s - began_s,
            self.sync_s,
            self.input_s,
            now_s,
        )

    def report(self, **where: int) -> Report:
        """What was measured since the last report. Called off the training thread."""
        nothing = Totals(0, 0.0, 0.0, 0.0, 0.0, 0.0)
        done, reported = self._done or nothing, self._reported or nothing
        self._reported = self._done
        sync_s, input_s = done.sync_s - reported.sync_s, done.input_s - reported.input_s
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
            steps=done.steps - reported.steps,
            samples=done.samples - reported.samples,
            seconds=done.at_s - reported.at_s,
            compute_s=max(0.0, done.busy_s - reported.busy_s - sync_s - input_s),
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
