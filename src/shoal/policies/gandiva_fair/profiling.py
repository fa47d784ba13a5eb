"""Transparent profiling: measuring the speed of jobs on each GPU type by running them there for a short time.

All running jobs are measured. For missing, stale or noisy measurements a job visits that type; a few jobs visit at a
time. If all jobs of a user are alike (a hyper-parameter search), the user has one profile; otherwise each job has its
own. Only measurements count: a newer type is not assumed to be faster.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import inf, nan, sqrt
from typing import Any

from shoal.core.errors import ShoalError


@dataclass(frozen=True, slots=True)
class Measured:
    """Measured speed of one GPU of a type: mean and spread of the samples (Welford), and the time of the last."""

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
    """When a profile is complete."""

    #: Least number of samples of a type.
    least_samples: int = 2
    #: Largest standard error of the mean, relative to it. Above it, more samples are taken.
    tolerance: float = 0.1
    #: Most samples of a type, however noisy they are.
    most_samples: int = 20
    #: After this time without a sample the type is measured again.
    stale_s: float = 7 * 86400.0
    #: If a sample differs from the mean by more than this, relative to it, and by more than four times the spread,
    #: the job has changed. For `settle_s` after a measurement, changes are not checked.
    drift: float = 0.25
    settle_s: float = 3600.0

    def drifted(self, m: Measured | None, speed: float, now_s: float) -> bool:
        """Whether a sample contradicts a complete measurement."""
        if m is None or self.lacks(m, now_s) or now_s - m.last_s < self.settle_s:
            return False
        return abs(speed / m.mean - 1.0) > max(self.drift, 4.0 * m.spread)

    def lacks(self, m: Measured | None, now_s: float) -> str | None:
        """Why the measurement is incomplete: missing, stale or noisy; None if it is complete."""
        if m is None or m.samples < self.least_samples:
            return "missing"
        if now_s - m.last_s > self.stale_s:
            return "stale"
        if m.uncertainty > self.tolerance and m.samples < self.most_samples:
            return "noisy"
        return None


@dataclass(frozen=True, slots=True)
class Visit:
    """A job that runs on a type for a short time to be measured there."""

    job: int
    gpu_type: int
    why: str


@dataclass(slots=True)
class Profiles:
    """Measurements by key (user or job) and GPU type."""

    rules: Rules = field(default_factory=Rules)
    known: dict[str, dict[int, Measured]] = field(default_factory=dict)

    def observe(self, key: str, gpu_type: int, speed: float, now_s: float) -> None:
        """Add a sample. If the last one is stale, the profile of the type starts again."""
        mine = self.known.setdefault(key, {})
        before = mine.get(gpu_type, Measured())
        if now_s - before.last_s > self.rules.stale_s:
            before = Measured()
        mine[gpu_type] = before.add(speed, now_s)

    def speed(self, key: str, gpu_type: int) -> float:
        """Mean speed of one GPU of this type; nan if it was not measured."""
        m = self.known.get(key, {}).get(gpu_type)
        return nan if m is None else m.mean

    def speed_up(self, key: str, fast: int, slow: int) -> float:
        return self.speed(key, fast) / self.speed(key, slow)

    def forget(self, key: str) -> None:
        self.known.pop(key, None)

    def lacking(self, key: str, types: Iterable[int], now_s: float) -> list[tuple[int, str]]:
        """(type, reason) of the types that must still be measured for this key."""
        mine = self.known.get(key, {})
        return [(t, why) for t in types if (why := self.rules.lacks(mine.get(t), now_s)) is not None]

    def visits(
        self,
        jobs: Iterable[tuple[int, str, tuple[int, ...]]],
        under_way: Mapping[int, int],
        now_s: float,
        most: int,
    ) -> list[Visit]:
        """Visits to start, so that at most `most` are active including those `under_way` (job: type).

        `jobs` are (id, key, usable types), preferred jobs first. One job of each key visits at a time. Missing types
        come first, then stale types, then noisy types.
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
