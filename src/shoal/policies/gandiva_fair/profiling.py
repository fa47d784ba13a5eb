"""Transparent profiling: learning how fast jobs are on each GPU type by running them there for a short while.

Whatever runs is measured. What is missing, stale or noisy is filled in by sending a job to that type for a
visit, a few at a time. Where all jobs of a user are alike (a hyper-parameter search) one profile serves the
user; else each job has its own. No newer type is taken to be faster: only measurements count.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import inf, nan, sqrt
from typing import Any

from shoal.core.errors import ShoalError


@dataclass(frozen=True, slots=True)
class Measured:
    """Speed of one GPU of a type as measured: mean and spread of the samples (Welford), and the last time."""

    samples: int = 0
    mean: float = 0.0
    squares: float = 0.0
    last_s: float = -inf

    def add(self, speed: float, now_s: float) -> Measured:
        if not (speed > 0 and speed < inf):
            raise ShoalError(f"a measured speed must be positive and finite, not {speed}")
        n = self.samples + 1
        off = speed - self.mean
        mean = self.mean + off / n
        return Measured(n, mean, self.squares + off * (speed - mean), now_s)

    @property
    def spread(self) -> float:
        """Standard deviation of the samples relative to their mean; nan with fewer than two."""
        return nan if self.samples < 2 else sqrt(self.squares / (self.samples - 1)) / self.mean

    @property
    def uncertainty(self) -> float:
        """Standard error of the mean relative to it; inf with fewer than two samples."""
        return inf if self.samples < 2 else self.spread / sqrt(self.samples)


@dataclass(frozen=True, slots=True)
class Rules:
    """When a profile is good enough."""

    #: Samples a type needs at least.
    least_samples: int = 2
    #: Standard error relative to the mean above which more samples are taken.
    tolerance: float = 0.1
    #: A noisy type is given up on after so many samples: it is as good as it gets.
    most_samples: int = 20
    #: After this long without a sample the type is measured anew.
    stale_s: float = 7 * 86400.0
    #: A sample further off the mean than this, relative to it, and than four times the spread, tells that the
    #: job has changed; who has changed is not looked at again for `settle_s`.
    drift: float = 0.25
    settle_s: float = 3600.0

    def drifted(self, m: Measured | None, speed: float, now_s: float) -> bool:
        """Whether a sample contradicts a measurement that was good enough."""
        if m is None or self.lacks(m, now_s) or now_s - m.last_s < self.settle_s:
            return False
        return abs(speed / m.mean - 1.0) > max(self.drift, 4.0 * m.spread)

    def lacks(self, m: Measured | None, now_s: float) -> str | None:
        """Why this measurement does not do: missing, stale or noisy; None if it does."""
        if m is None or m.samples < self.least_samples:
            return "missing"
        if now_s - m.last_s > self.stale_s:
            return "stale"
        if m.uncertainty > self.tolerance and m.samples < self.most_samples:
            return "noisy"
        return None


@dataclass(frozen=True, slots=True)
class Visit:
    """A job that is to run on a type for a while, so that it gets measured there."""

    job: int
    gpu_type: int
    why: str


@dataclass(slots=True)
class Profiles:
    """What was measured so far, by key (a user's or a job's) and GPU type."""

    rules: Rules = field(default_factory=Rules)
    known: dict[str, dict[int, Measured]] = field(default_factory=dict)

    def observe(self, key: str, gpu_type: int, speed: float, now_s: float) -> None:
        """Take in a sample; the first after a stale gap starts the type's profile anew."""
        mine = self.known.setdefault(key, {})
        before = mine.get(gpu_type, Measured())
        if now_s - before.last_s > self.rules.stale_s:
            before = Measured()
        mine[gpu_type] = before.add(speed, now_s)

    def speed(self, key: str, gpu_type: int) -> float:
        """Mean speed of one GPU of this type, nan as long as nothing is known."""
        m = self.known.get(key, {}).get(gpu_type)
        return nan if m is None else m.mean

    def speed_up(self, key: str, fast: int, slow: int) -> float:
        return self.speed(key, fast) / self.speed(key, slow)

    def forget(self, key: str) -> None:
        self.known.pop(key, None)

    def lacking(self, key: str, types: Iterable[int], now_s: float) -> list[tuple[int, str]]:
        """(type, why) of those that still have to be measured for this key."""
        mine = self.known.get(key, {})
        return [(t, why) for t in types if (why := self.rules.lacks(mine.get(t), now_s)) is not None]

    def visits(
        self,
        jobs: Iterable[tuple[int, str, tuple[int, ...]]],
        under_way: Mapping[int, int],
        now_s: float,
        most: int,
    ) -> list[Visit]:
        """Which jobs to send where, at most `most` at a time with those `under_way` (job: type).

        `jobs` are (id, key, types it may use), preferred ones first. Of each key one job visits at a time;
        missing types come before stale ones, and those before noisy ones.
        """
        busy_keys = set()
        candidates: dict[str, tuple[int, tuple[int, ...]]] = {}
        for job, key, types in jobs:
            if job in under_way:
                busy_keys.add(key)
            else:
                candidates.setdefault(key, (job, types))
        wanted = []
        for key, (job, types) in candidates.items():
            if key in busy_keys or len(types) < 2:
                continue
            lacking = self.lacking(key, types, now_s)
            if lacking:
                gpu_type, why = min(lacking, key=lambda lack: _URGENCY.index(lack[1]))
                wanted.append(Visit(job, gpu_type, why))
        wanted.sort(key=lambda v: _URGENCY.index(v.why))
        return wanted[: max(most - len(under_way), 0)]

    def state(self) -> dict[str, Any]:
        return {
            key: {str(t): [m.samples, m.mean, m.squares, m.last_s] for t, m in mine.items()}
            for key, mine in self.known.items()
        }

    def restore(self, state: Mapping[str, Mapping[str, list[float]]]) -> None:
        self.known = {
            key: {int(t): Measured(int(m[0]), m[1], m[2], m[3]) for t, m in mine.items()}
            for key, mine in state.items()
        }


_URGENCY = ("missing", "stale", "noisy")
