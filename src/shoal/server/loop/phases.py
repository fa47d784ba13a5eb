"""The time that each phase of a cycle takes."""

from __future__ import annotations

import time


class Phases:
    """Milliseconds by phase, as `key=value` pairs for a structured log line."""

    def __init__(self) -> None:
        self._last = time.perf_counter()
        self._ms: dict[str, float] = {}

    def end(self, phase: str) -> float:
        """The phase ends now. Returns its milliseconds."""
        now = time.perf_counter()
        self._ms[phase], self._last = 1e3 * (now - self._last), now
        return self._ms[phase]

    def __str__(self) -> str:
        return " ".join(f"{phase}_ms={ms:.2f}" for phase, ms in self._ms.items())
