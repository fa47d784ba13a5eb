"""One job's size, searched online while a policy shares the cluster among many (`autoscale` of a job).

The autoscaler's engine says which size it wants to see next. Here that is a hold: the size beyond which the job
wants no more GPUs. The policy gives it so many or fewer, by its own rules, and what it gives is measured. So the
search works beside every policy that resizes; it can make a job want less, never get more than is its due.
"""

from __future__ import annotations

import dataclasses
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

#: Each step is seen.
BY_STEP = replace(IMPROVED, step_gpus=1)
#: Each observation is the mean of several steps, so that fewer are needed.
BY_REPORT = replace(
    BY_STEP, decide_every_steps=5, memory_steps=60, rules=replace(IMPROVED.rules, sure_after_steps=30)
)
_LIMITS = ("step", "max_batch", "min_local_batch")


@dataclass(frozen=True, slots=True)
class Autoscale:
    """What an owner asks for: a heuristic, how far sizes are apart, and limits of the batch."""

    heuristic: Heuristic
    #: GPUs from one size to the next: with more of them neighbours differ by more than noise.
    step: int = 1
    #: The largest global batch, and the fewest samples that each GPU must have of it.
    max_batch: int | None = None
    min_local_batch: int = 1

    @classmethod
    def parse(cls, word: str, found: Iterable[EntryPoint] | None = None) -> Autoscale:
        """`efficiency:threshold=0.5`, `utility:worth=10,0:at_s=0,3600:max_batch=512`, or a name of one's own."""
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
    """The heuristic, with its options if it is a dataclass; whose making it is, it fails with a sentence."""
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
    """The size beyond which a job wants no more (None: it is not held), and why in a sentence."""

    gpus: int | None
    why: str
    searching: bool = False


class SizeSearch:
    """Of one job. `observe` what was measured, then ask `decide`; tell the scheduler when the hold changes."""

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
        self.hold = self._begin(min_gpus)

    @staticmethod
    def _begin(gpus: int) -> SizeCap:
        return SizeCap(
            gpus,
            f"the autoscaler measures {counted(gpus, 'GPU')} before it lets it have more",
            searching=True,
        )

    def observe(self, gpus: int, step_s: float, samples: float = 1.0) -> Unknown | None:
        """A step of `samples`, or the mean of some, with so many GPUs."""
        return self.engine.observe(gpus, step_s, samples)

    def decide(self, progress: Progress | None = None) -> SizeCap | None:
        """The new hold, None if the last one stands."""
        decision = self.engine.decide(progress)
        size = counted(decision.gpus, "GPU")
        match decision.code:
            case "Measuring" | "Waiting":
                return None
            case "Unknown":
                hold = SizeCap(None, f"the autoscaler lets it have any size: unknown, because {decision.why}")
            case "Climb" | "Descend" | "Gather":
                text = f"the autoscaler tries {size}: {decision.why}"
                hold = SizeCap(decision.gpus, text, searching=True)
            case _:
                hold = SizeCap(decision.gpus, f"the autoscaler holds it at {size}: {decision.why}")
        # A sentence with slightly other numbers is no news.
        if (hold.gpus, hold.searching) == (self.hold.gpus, self.hold.searching):
            return None
        self.hold = hold
        return hold

    def rescaled(self, min_gpus: int, max_gpus: int) -> SizeCap:
        """The owner has changed the range: search anew within it, from what was measured last."""
        self.engine.conditions_changed(min_gpus=min_gpus, max_gpus=max_gpus)
        start = min(max(self.engine.gpus, min_gpus), max_gpus)
        self.hold = self._begin(start)
        return self.hold

    def to_dict(self) -> dict[str, Any]:
        """The state as plain values; what was asked for is given again on loading."""
        return {"engine": self.engine.to_dict(), "hold": dataclasses.astuple(self.hold)}

    @classmethod
    def from_dict(cls, state: dict[str, Any], asked: Autoscale, options: Options = BY_STEP) -> SizeSearch:
        try:
            kept = state["engine"]
            search = cls(asked, kept["min_gpus"], kept["max_gpus"], options)
            search.engine = Autoscaler.from_dict(kept, search.engine.options, asked.heuristic)
            search.hold = SizeCap(*state["hold"])
        except (KeyError, TypeError, AttributeError) as error:
            raise ShoalError(f"the saved search cannot be read: {type(error).__name__} {error}") from None
        return search
