"""Online search for the size of one job under a policy that shares the cluster (`autoscale` of a job).

The autoscaler's engine chooses the size to try next. Here that size is a cap: the policy gives the job this many
GPUs or fewer, by its own rules, and the search measures the size that the job gets. The search therefore works with
every policy that resizes: it can make a job use fewer GPUs than its share, never more.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from importlib.metadata import EntryPoint
from types import SimpleNamespace
from typing import Any

from shoal.core.errors import ShoalError
from shoal.core.options import make_options
from shoal.core.words import counted
from shoal.knowledge.autoscaler import IMPROVED, Autoscaler, Options
from shoal.knowledge.heuristics import Heuristic, Progress, find_heuristic
from shoal.knowledge.unknown import Unknown

#: Options if every step is observed.
BY_STEP = replace(IMPROVED, step_gpus=1)
#: Options if each observation is the mean of several steps, so that fewer are needed.
BY_REPORT = replace(
    BY_STEP, decide_every_steps=5, memory_steps=60, rules=replace(IMPROVED.rules, sure_after_steps=30)
)
_LIMITS = ("step", "max_batch", "min_local_batch")


@dataclass(frozen=True, slots=True)
class Autoscale:
    """The owner's request: a heuristic, the distance between sizes, and limits of the batch size."""

    heuristic: Heuristic
    #: GPUs from one size to the next. Sizes further apart differ more clearly from the noise.
    step: int = 1
    #: The largest global batch, and the smallest number of samples per GPU.
    max_batch: int | None = None
    min_local_batch: int = 1

    @classmethod
    def parse(cls, word: str, found: Iterable[EntryPoint] | None = None) -> Autoscale:
        """Parse `efficiency:threshold=0.5`, `utility:worth=10,0:at_s=0,3600:max_batch=512`, or a plug-in's name."""
        name, *pairs = word.split(":")
        given: dict[str, str] = {}
        for pair in pairs:
            key, equals, value = pair.partition("=")
            if not equals or not key:
                raise ShoalError(f"autoscale {word}: write {name}:option=value, not {pair!r}")
            given[key] = value
        limits = {key: _count(key, given.pop(key)) for key in _LIMITS if key in given}
        made = find_heuristic(name, found)
        if isinstance(made, Unknown):
            raise ShoalError(f"autoscale {word}: {made.why}")
        return cls(_make(name, made, given), **limits)

    def in_steps_of(self, gpus: int) -> Autoscale:
        """For a job that can have multiples of so many GPUs only."""
        return self if gpus == 1 else replace(self, step=math.lcm(self.step, gpus))

    def options(self, base: Options, min_gpus: int, max_gpus: int, transition_s: float) -> Options:
        return replace(
            base,
            min_gpus=min_gpus,
            max_gpus=max_gpus,
            step_gpus=self.step,
            max_global_batch=self.max_batch,
            min_local_batch=self.min_local_batch,
            transition_s=transition_s,
        )


def _count(key: str, text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ShoalError(f"autoscale: {key}={text!r} is not a number from 1 on")
    return int(text)


def _make(name: str, made: Any, given: dict[str, str]) -> Heuristic:
    """Make the heuristic, with its options if it is a dataclass. Failures of a plug-in become a ShoalError."""
    try:
        if not dataclasses.is_dataclass(made):
            if given:
                raise ShoalError(f"heuristic {name!r} has no option {min(given)!r}; it has none")
            heuristic = made()
        else:
            needed = [f.name for f in dataclasses.fields(made) if _is_needed(f) and f.name not in given]
            if needed:
                raise ShoalError(f"heuristic {name!r} needs {' and '.join(needed)}: {name}:{needed[0]}=...")
            heuristic = make_options(SimpleNamespace(name=name, Options=made), given, "heuristic")
    except ShoalError:
        raise
    except Exception as error:
        raise ShoalError(f"heuristic {name!r} cannot be made: {error}") from None
    if not callable(getattr(heuristic, "judge", None)):
        raise ShoalError(f"heuristic {name!r} is {heuristic!r}, which has no `judge`; see docs/knowledge.md")
    ready: Heuristic = heuristic
    return ready


def _is_needed(option: dataclasses.Field[Any]) -> bool:
    return option.default is dataclasses.MISSING and option.default_factory is dataclasses.MISSING


@dataclass(frozen=True, slots=True)
class SizeCap:
    """The largest size that a job may have (None: no cap), and the reason as a sentence."""

    gpus: int | None
    why: str
    searching: bool = False


class SizeSearch:
    """The search of one job. Call `observe` with measurements, then `decide`; pass a new cap to the scheduler."""

    def __init__(
        self,
        asked: Autoscale,
        min_gpus: int,
        max_gpus: int,
        options: Options = BY_STEP,
        *,
        transition_s: float = 0.0,
    ) -> None:
        self.engine = Autoscaler(
            min_gpus, asked.options(options, min_gpus, max_gpus, transition_s), asked.heuristic
        )
        self.cap = self._begin(min_gpus)

    @staticmethod
    def _begin(gpus: int) -> SizeCap:
        return SizeCap(
            gpus,
            f"the autoscaler measures {counted(gpus, 'GPU')} before it lets it have more",
            searching=True,
        )

    def observe(self, gpus: int, step_s: float, samples: float = 1.0) -> Unknown | None:
        """Add a step of `samples` samples, or the mean of several steps, with this many GPUs."""
        return self.engine.observe(gpus, step_s, samples)

    def decide(self, progress: Progress | None = None) -> SizeCap | None:
        """The new cap, or None if the last one is still valid."""
        decision = self.engine.decide(progress)
        size = counted(decision.gpus, "GPU")
        match decision.code:
            case "Measuring" | "Waiting":
                return None
            case "Unknown":
                cap = SizeCap(None, f"the autoscaler lets it have any size: unknown, because {decision.why}")
            case "Climb" | "Descend" | "Gather":
                text = f"the autoscaler tries {size}: {decision.why}"
                cap = SizeCap(decision.gpus, text, searching=True)
            case _:
                cap = SizeCap(decision.gpus, f"the autoscaler holds it at {size}: {decision.why}")
        # Slightly different numbers in the reason alone are not a new cap.
        if (cap.gpus, cap.searching) == (self.cap.gpus, self.cap.searching):
            return None
        self.cap = cap
        return cap

    def rescaled(self, min_gpus: int, max_gpus: int) -> SizeCap:
        """The owner has changed the range: search again within it, starting from the last measured size."""
        self.engine.conditions_changed(min_gpus=min_gpus, max_gpus=max_gpus)
        start = min(max(self.engine.gpus, min_gpus), max_gpus)
        self.cap = self._begin(start)
        return self.cap

    def to_dict(self) -> dict[str, Any]:
        """The state as plain values. The owner's request is not included: pass it again on loading."""
        return {"engine": self.engine.to_dict(), "hold": dataclasses.astuple(self.cap)}

    @classmethod
    def from_dict(cls, state: dict[str, Any], asked: Autoscale, options: Options = BY_STEP) -> SizeSearch:
        try:
            kept = state["engine"]
            search = cls(asked, kept["min_gpus"], kept["max_gpus"], options)
            search.engine = Autoscaler.from_dict(kept, search.engine.options, asked.heuristic)
            search.cap = SizeCap(*state["hold"])
        except (KeyError, TypeError, AttributeError) as error:
            raise ShoalError(f"the saved search cannot be read: {type(error).__name__} {error}") from None
        return search
