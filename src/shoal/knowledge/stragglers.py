"""Workers that hold the others up, found from the time each needs to compute its part of a step.

The rule of Or, Zhang and Freedman (MLSys'20): a worker's compute speed relative to the median of all workers,
smoothed by an exponential average (α = 0.1), below 0.8 makes it a straggler. Only compute time counts:
waiting in the all-reduce is the same for all. The median does not move when a few workers are slow or one
step hangs.

Two things are ours, to have fewer false alarms. The average starts as a plain mean until 1/α steps are in, so
that one bad first step does not linger (`from_first=True` is the authors' start), and it must have been below
the limit for `confirm_steps` in a row.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from shoal.core.reason import Code, Reason
from shoal.knowledge.unknown import Unknown


@dataclass(frozen=True, slots=True)
class Straggler:
    """A worker to replace, and the reason."""

    worker: str
    relative_speed: float
    steps: int
    reason: Reason


@dataclass(slots=True)
class _Worker:
    steps: int = 0
    average: float = 1.0
    below: int = 0


class StragglerDetector:
    """Takes each step's compute seconds per worker; names those that should be replaced."""

    def __init__(
        self,
        *,
        alpha: float = 0.1,
        threshold: float = 0.8,
        after_steps: int = 10,
        confirm_steps: int = 3,
        from_first: bool = False,
    ) -> None:
        if not (0 < alpha <= 1 and 0 < threshold < 1):
            raise ValueError("alpha must be in (0, 1] and threshold in (0, 1)")
        self.alpha = alpha
        self.threshold = threshold
        self.after_steps = after_steps
        self.confirm_steps = confirm_steps
        self.from_first = from_first
        self._workers: dict[str, _Worker] = {}
        self._since = 0

    def observe(self, compute_s: Mapping[str, float]) -> Unknown | None:
        """Take in one step. Impossible times are left out; fewer than two workers teach nothing."""
        usable = {w: s for w, s in compute_s.items() if math.isfinite(s) and s > 0}
        if len(usable) < 2:
            return Unknown(f"{len(usable)} worker has a usable compute time; comparing needs two")
        middle = median(1.0 / s for s in usable.values())
        self._since += 1
        for name, seconds in usable.items():
            self._update(self._workers.setdefault(name, _Worker()), 1.0 / (seconds * middle))
        bad = sorted(set(compute_s) - set(usable))
        return Unknown(f"no usable compute time from {', '.join(bad)}") if bad else None

    def stragglers(self) -> tuple[Straggler, ...]:
        """The workers to replace now, slowest first; none in the first steps after a change of workers."""
        if self._since < self.after_steps:
            return ()
        slow = [(w.average, name, w) for name, w in self._workers.items() if w.below >= self.confirm_steps]
        slow.sort(key=lambda item: (item[0], item[1]))
        return tuple(
            Straggler(name, speed, w.steps, self._reason(name, speed, w.steps)) for speed, name, w in slow
        )

    def _reason(self, worker: str, speed: float, steps: int) -> Reason:
        """Why the worker should be replaced."""
        return Reason(
            Code.STRAGGLER,
            f"worker {worker} computes at {speed:.2f} of the median speed (limit {self.threshold:.2f})",
            {"worker": worker, "relative_speed": speed, "limit": self.threshold, "steps": steps},
        )

    def workers_changed(self, workers: list[str]) -> None:
        """A new generation: forget who left, keep what is known of who stayed, wait before judging again."""
        self._workers = {name: self._workers[name] for name in workers if name in self._workers}
        self._since = 0

    def to_dict(self) -> dict[str, Any]:
        return {
            "since": self._since,
            "workers": [[name, w.steps, w.average, w.below] for name, w in self._workers.items()],
        }

    def load(self, state: dict[str, Any]) -> None:
        """Take over saved state (the options are the detector's own)."""
        self._since = state["since"]
        self._workers = {
            name: _Worker(steps, average, below) for name, steps, average, below in state["workers"]
        }

    def _update(self, worker: _Worker, relative_speed: float) -> None:
        worker.steps += 1
        share = self.alpha if self.from_first and worker.steps > 1 else max(self.alpha, 1.0 / worker.steps)
        worker.average += share * (relative_speed - worker.average)
        worker.below = worker.below + 1 if worker.average < self.threshold else 0
