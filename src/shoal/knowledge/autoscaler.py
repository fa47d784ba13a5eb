"""Search for the size of one job while it trains: the autoscaling engine of Or, Zhang and Freedman (MLSys'20).

The engine grows the job while the heuristic passes, and returns to the last size that passed. The default
options are the authors' rules and numbers. `IMPROVED` changes the search: it doubles the size and then
bisects instead of walking, waits until a verdict is beyond the noise, tries smaller sizes only if the lowest
step fails, leaves a settled size only for a clear gain, and searches again when the speed changes.

This is a pure state machine: `observe` takes measured steps, `decide` returns what to do. It reads no clock and
knows nothing about the cluster.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

from shoal.knowledge.climb import Aim, Rules, aim_for, ladder
from shoal.knowledge.counts import is_count
from shoal.knowledge.heuristics import Heuristic, Point, Progress, ScalingEfficiency
from shoal.knowledge.unknown import Unknown

#: A measurement with more samples per second is an error. The square of the limit is still finite.
MOST_SPEED = 1e100


@dataclass(frozen=True, slots=True)
class Options:
    """The engine's parameters; the defaults are those of the authors' code."""

    min_gpus: int = 4
    max_gpus: int = 60
    step_gpus: int = 4
    sizes: tuple[int, ...] = ()  # allowed sizes, instead of min, min + step, ...
    decide_every_steps: int = 10
    rules: Rules = field(default_factory=Rules)
    max_global_batch: int | None = None
    min_local_batch: int = 1
    memory_steps: int | None = None  # None: all steps count
    recheck_change: float | None = None  # a relative change of speed that restarts the search
    transition_s: float = 0.0  # cost of one resize; 0: not considered


IMPROVED = Options(
    rules=Rules(
        doubling=True,
        passes_before_settling=1,
        steps_at_next=0,
        confidence=2.0,
        sure_after_steps=100,
        hysteresis=0.05,
    ),
    memory_steps=200,
    recheck_change=0.2,
)


@dataclass(frozen=True, slots=True)
class Decision:
    """The size that the job should have, the kind of decision, and the reason as a sentence."""

    gpus: int
    code: str  # Measuring, Waiting, Climb, Descend, Gather, Settle, Stay, NotWorthIt, Unknown
    why: str


@dataclass(slots=True)
class _Speed:
    """Running mean and variance of samples per second at one size."""

    steps: int = 0
    mean: float = 0.0
    variance: float = 0.0

    def add(self, value: float, memory: int | None) -> None:
        self.steps += 1
        share = 1.0 / (self.steps if memory is None else min(self.steps, memory))
        difference = value - self.mean
        self.mean += share * difference
        self.variance = (1.0 - share) * (self.variance + share * difference * difference)

    def point(self, gpus: int, memory: int | None) -> Point:
        effective = self.steps if memory is None else min(self.steps, 2 * memory)
        error = math.sqrt(self.variance / max(effective - 1, 1)) / self.mean
        return Point(gpus, self.mean, error, self.steps)


class Autoscaler:
    """Searches the size of one job. Call `decide` after each `observe`, carry out the decision, and repeat.

    The first step after every resize is ignored: its time includes the resize.
    """

    def __init__(self, gpus: int, options: Options | None = None, heuristic: Heuristic | None = None) -> None:
        self.options = options or Options()
        self.heuristic: Heuristic = heuristic or ScalingEfficiency()
        self.sizes = _sizes(self.options)
        self.gpus = gpus
        self._speeds: dict[int, _Speed] = {}
        self._recent = _Speed()
        self._since = 0
        self._drop = True
        self._pending: int | None = None
        self._settled: int | None = None

    def observe(self, gpus: int, step_s: float, samples: float) -> Unknown | None:
        """Add one step of `samples` (the global batch). An invalid step is ignored and the reason returned."""
        if not is_count(gpus):
            return Unknown(f"a step cannot run on {gpus} GPUs")
        if gpus != self.gpus:
            self._changed_size(gpus)
        if not (0 < step_s < math.inf and 0 < samples < math.inf and 0 < samples / step_s < MOST_SPEED):
            return Unknown(f"a step of {samples} samples cannot take {step_s} s")
        if self._drop:
            self._drop = False
            return None
        self._since += 1
        value = samples / step_s
        self._recent.add(value, self.options.decide_every_steps)
        self._speeds.setdefault(gpus, _Speed()).add(value, self.options.memory_steps)
        return None

    def rests_at(self, gpus: int) -> bool:
        """Whether this is the size that it settled at, or the size at which it waits for a requested resize."""
        return gpus == self.gpus and (self._pending is not None or self._settled == gpus)

    def steps_due(self, gpus: int) -> int:
        """Number of steps with this many GPUs that it needs before it decides again."""
        every = self.options.decide_every_steps
        return every + 1 if gpus != self.gpus else every - self._since % every + self._drop

    def decide(self, progress: Progress | None = None) -> Decision:
        """What to do now. It decides every `decide_every_steps` steps and measures in between."""
        options, where = self.options, progress or Progress()
        if not self.sizes:
            return Decision(self.gpus, "Stay", "no size is allowed by the limits of size and batch")
        if self._pending is not None:
            return Decision(self._pending, "Waiting", f"the change to {self._pending} GPUs is under way")
        if self._since == 0 or self._since % options.decide_every_steps:
            return Decision(self.gpus, "Measuring", f"measuring {self.gpus} GPUs ({self._since} steps)")
        if self._has_changed():
            self.conditions_changed()
        # Ignore sizes that the cluster changed before they had enough measurements.
        points = [
            speed.point(k, options.memory_steps)
            for k, speed in sorted(self._speeds.items())
            if speed.steps >= options.decide_every_steps
        ]
        aim = aim_for(points, self.gpus, self.sizes, options.rules, self.heuristic, where, self._settled)
        return self._act(aim, where)

    def conditions_changed(self, *, min_gpus: int | None = None, max_gpus: int | None = None) -> None:
        """Discard the measurements at other sizes and search again, possibly within new limits."""
        lowest = self.options.min_gpus if min_gpus is None else min_gpus
        highest = self.options.max_gpus if max_gpus is None else max_gpus
        self.options = replace(self.options, min_gpus=lowest, max_gpus=highest)
        self.sizes = _sizes(self.options)
        seen = min(self._recent.steps, self.options.decide_every_steps)
        self._speeds = {self.gpus: replace(self._recent, steps=seen)} if seen else {}
        self._settled = None
        self._pending = None

    def resize_refused(self) -> None:
        """The cluster could not carry out the last resize: stay at the present size, and do not request more."""
        if self._pending is not None and self._pending > self.gpus:
            self.sizes = tuple(k for k in self.sizes if k < self._pending)
        self._pending = None

    def to_dict(self) -> dict[str, Any]:
        """The state as plain values. Options and heuristic are not included: pass them again on loading."""
        return {
            "gpus": self.gpus,
            "sizes": list(self.sizes),
            "min_gpus": self.options.min_gpus,
            "max_gpus": self.options.max_gpus,
            "speeds": [[k, s.steps, s.mean, s.variance] for k, s in self._speeds.items()],
            "recent": [self._recent.steps, self._recent.mean, self._recent.variance],
            "since": self._since,
            "drop": self._drop,
            "pending": self._pending,
            "settled": self._settled,
        }

    @classmethod
    def from_dict(
        cls, state: dict[str, Any], options: Options | None = None, heuristic: Heuristic | None = None
    ) -> Autoscaler:
        limits = replace(options or Options(), min_gpus=state["min_gpus"], max_gpus=state["max_gpus"])
        engine = cls(state["gpus"], limits, heuristic)
        engine.sizes = tuple(state["sizes"])
        engine._speeds = {k: _Speed(steps, mean, variance) for k, steps, mean, variance in state["speeds"]}
        engine._recent = _Speed(*state["recent"])
        engine._since, engine._drop = state["since"], state["drop"]
        engine._pending, engine._settled = state["pending"], state["settled"]
        return engine

    def _changed_size(self, gpus: int) -> None:
        self.gpus = gpus
        self._since = 0
        self._drop = True
        self._pending = None
        self._recent = _Speed()

    def _has_changed(self) -> bool:
        limit = self.options.recheck_change
        known = self._speeds.get(self.gpus)
        if limit is None or known is None or self._settled != self.gpus:
            return False
        return abs(self._recent.mean / known.mean - 1.0) > limit

    def _act(self, aim: Aim, progress: Progress) -> Decision:
        if aim.code == "Settle":
            self._settled = aim.gpus
        if aim.gpus == self.gpus:
            return Decision(self.gpus, "Stay" if aim.code == "Settle" else aim.code, aim.why)
        cost = self._not_paid_back(aim, progress)
        if cost is not None:
            self._settled = self.gpus
            return Decision(self.gpus, "NotWorthIt", cost)
        self._pending = aim.gpus
        return Decision(aim.gpus, aim.code, aim.why)

    def _not_paid_back(self, aim: Aim, progress: Progress) -> str | None:
        """Why a resize would cost more than it gains in the remaining time; None if it pays off.

        The gain is time when growing and GPU-time when shrinking. For a size that was never measured, perfect
        scaling is assumed, and the cost includes the way back.
        """
        here = self._speeds.get(self.gpus)
        pause_s = self.options.transition_s
        if pause_s <= 0 or progress.remaining_samples is None or here is None:
            return None
        there = self._speeds.get(aim.gpus)
        hoped = here.mean * aim.gpus / self.gpus if there is None else there.mean
        moves = 2 if there is None else 1
        now_s, then_s = progress.remaining_samples / here.mean, progress.remaining_samples / hoped
        if aim.gpus > self.gpus and now_s - then_s <= moves * pause_s:
            return f"{aim.gpus} GPUs would save {now_s - then_s:.0f} s, less than the change costs"
        saved = now_s * self.gpus - then_s * aim.gpus
        if aim.gpus < self.gpus and there is not None and saved <= pause_s * aim.gpus:
            return f"{aim.gpus} GPUs would save {saved:.0f} GPU-seconds, less than the change costs"
        return None


def _sizes(options: Options) -> tuple[int, ...]:
    """The allowed sizes: from min to max, with at least `min_local_batch` samples per GPU."""
    top = options.max_gpus
    if options.max_global_batch is not None:
        top = min(top, options.max_global_batch // max(options.min_local_batch, 1))
    return ladder(options.min_gpus, top, options.step_gpus, options.sizes)
