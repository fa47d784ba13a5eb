"""The scaling conditions of Or, Zhang and Freedman (MLSys'20): when is a larger size worth it?

A heuristic compares the measurements at a smaller and at a larger size and returns a margin: the larger size
passes if it is positive. Installed packages can add heuristics under the entry point group `shoal.heuristics`:
either a frozen dataclass with `judge` whose fields are its options, or any callable without arguments that
returns an object with `judge`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Protocol

import numpy as np

from shoal.knowledge.unknown import Unknown

GROUP = "shoal.heuristics"


@dataclass(frozen=True, slots=True)
class Point:
    """Measurements at one size: samples per second, their relative error, and the number of steps."""

    gpus: int
    throughput: float
    relative_error: float
    steps: int


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of the job. Remaining samples may be unknown."""

    elapsed_s: float = 0.0
    remaining_samples: float | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """The margin by which the larger size passes (positive) or fails (negative), and its standard error."""

    margin: float
    std_error: float
    why: str

    @property
    def passes(self) -> bool:
        return self.margin > 0


class Heuristic(Protocol):
    def judge(self, smaller: Point, larger: Point, progress: Progress) -> Verdict | Unknown: ...


@dataclass(frozen=True, slots=True)
class ScalingEfficiency:
    """Throughput scaling efficiency: s = ((R' - R) / (k' - k)) / (R / k) > S.

    The speed that an added GPU brings, relative to the speed per GPU before: 1 is perfect scaling, 0 no gain.
    """

    threshold: float = 0.1

    def __post_init__(self) -> None:
        if not math.isfinite(self.threshold):
            raise ValueError(f"the threshold must be a number, not {self.threshold}")

    def judge(self, smaller: Point, larger: Point, progress: Progress) -> Verdict | Unknown:
        if smaller.throughput <= 0 or larger.gpus <= smaller.gpus:
            return Unknown("the smaller size has no throughput to compare with")
        ratio = larger.throughput / smaller.throughput
        stretch = smaller.gpus / (larger.gpus - smaller.gpus)
        efficiency = (ratio - 1.0) * stretch
        noise = ratio * stretch * math.hypot(smaller.relative_error, larger.relative_error)
        sentence = (
            f"from {smaller.gpus} to {larger.gpus} GPUs each adds {efficiency:.2f} of a GPU's speed"
            f" (limit {self.threshold:.2f})"
        )
        return Verdict(efficiency - self.threshold, noise, sentence)


@dataclass(frozen=True, slots=True)
class Utility:
    """The utility of finishing after some seconds: piecewise linear, and the last line is extrapolated.

    Two points give the paper's linear utility. Beyond a point of zero worth it is negative.
    """

    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        times = [time for time, _ in self.points]
        if not all(math.isfinite(number) for point in self.points for number in point):
            raise ValueError("a utility needs numbers, of seconds and of what they are worth")
        if len(times) < 2 or times != sorted(set(times)):
            raise ValueError(
                "a utility needs two or more (seconds, worth) points in increasing order of seconds"
            )

    @classmethod
    def linear(cls, worth_at_once: float, worthless_after_s: float) -> Utility:
        return cls(((0.0, worth_at_once), (worthless_after_s, 0.0)))

    def until(self, expected_s: float) -> Utility:
        """The same utility, with worth 0 at the initially expected time if that is after the last point."""
        if expected_s <= self.points[-1][0]:
            return self
        return Utility((*self.points, (expected_s, 0.0)))

    def at(self, seconds: float) -> float:
        times, worths = zip(*self.points)
        if seconds <= times[-1]:
            return float(np.interp(seconds, times, worths))
        slope = (worths[-1] - worths[-2]) / (times[-1] - times[-2])
        return float(worths[-1] + slope * (seconds - times[-1]))


@dataclass(frozen=True, slots=True)
class UtilityAgainstCost:
    """Utility against cost: ΔU > ΔC.

    U is the owner's utility at the expected total time (points `worth` by `at_s`, see `Utility`). C is the cost of
    the remaining time at a price per GPU and hour. The remaining work must be known.
    """

    worth: tuple[float, ...]
    at_s: tuple[float, ...]
    price_per_gpu_hour: float = 1.0

    def __post_init__(self) -> None:
        if len(self.worth) != len(self.at_s):
            raise ValueError(
                f"a utility needs as many worths as times, not {len(self.worth)} and {len(self.at_s)}"
            )
        if not 0 <= self.price_per_gpu_hour < math.inf:
            raise ValueError(f"a price must be a number from 0 up, not {self.price_per_gpu_hour}")
        self.utility  # noqa: B018 checks the points

    @property
    def utility(self) -> Utility:
        return Utility(tuple(zip(self.at_s, self.worth)))

    @property
    def price_per_gpu_s(self) -> float:
        return self.price_per_gpu_hour / 3600.0

    def judge(self, smaller: Point, larger: Point, progress: Progress) -> Verdict | Unknown:
        left = progress.remaining_samples
        if left is None or not (0 <= left < math.inf and 0 <= progress.elapsed_s < math.inf):
            return Unknown("utility against cost needs to know the remaining work")
        if smaller.throughput <= 0 or larger.throughput <= 0:
            return Unknown("one of the sizes has no throughput")
        before_s, after_s = left / smaller.throughput, left / larger.throughput
        gain = self._worth(progress, after_s) - self._worth(progress, before_s)
        price = self.price_per_gpu_s * (after_s * larger.gpus - before_s * smaller.gpus)
        noise = math.hypot(
            self._slope(progress, before_s, smaller.gpus) * before_s * smaller.relative_error,
            self._slope(progress, after_s, larger.gpus) * after_s * larger.relative_error,
        )
        sentence = (
            f"{larger.gpus} GPUs are worth {gain:.4g} more and cost {price:.4g} more than {smaller.gpus}"
        )
        return Verdict(gain - price, noise, sentence)

    def _worth(self, progress: Progress, remaining_s: float) -> float:
        return self.utility.at(progress.elapsed_s + remaining_s)

    def _slope(self, progress: Progress, remaining_s: float, gpus: int) -> float:
        """Change of (utility - cost) per second of remaining time."""
        small = max(1e-6 * remaining_s, 1e-9)
        utility = (self._worth(progress, remaining_s + small) - self._worth(progress, remaining_s)) / small
        return utility - self.price_per_gpu_s * gpus


BUILT_IN: dict[str, Callable[..., Heuristic]] = {
    "efficiency": ScalingEfficiency,
    "utility": UtilityAgainstCost,
}


def find_heuristic(
    name: str, found: Iterable[EntryPoint] | None = None
) -> Callable[..., Heuristic] | Unknown:
    """The factory of a heuristic by name: built in, or installed under the entry point group."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    installed = {point.name: point for point in (entry_points(group=GROUP) if found is None else found)}
    if name not in installed:
        known = ", ".join(sorted({*BUILT_IN, *installed}))
        return Unknown(f"there is no heuristic named {name}; there are {known}")
    try:
        made: Callable[..., Heuristic] = installed[name].load()
    except Exception as error:  # a plug-in may raise anything; report it without a traceback
        return Unknown(f"the heuristic {name} cannot be loaded: {type(error).__name__} {error}")
    return made
