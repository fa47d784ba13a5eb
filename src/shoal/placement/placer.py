"""What a placement is: it turns shares into GPUs on nodes, keeping what can be kept."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from shoal.core.decision import Decision
from shoal.core.plan import Placement
from shoal.core.supply import Supply
from shoal.core.view import View


@dataclass(frozen=True, slots=True)
class Placed:
    """Where the jobs are to be. A job whose share fits nowhere is named, with what would have fit."""

    #: New placement of each job (by job id) that starts, changes or moves; others stay as they are.
    placements: dict[int, Placement]
    #: Jobs (by id) that got fewer GPUs than decided because no placement held them: the number they got.
    cut: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Unplaced:
    """The answer for a job that fits nowhere."""

    because: str


class Placer(Protocol):
    """Chooses GPUs for the shares of a decision."""

    def place(self, view: View, decision: Decision, supply: Supply, current: dict[int, Placement]) -> Placed:
        """`current` is where each running job (by id) is now."""


class PoolPlacer:
    """All GPUs are alike and nowhere in particular: any share that is within the supply fits."""

    def place(self, view: View, decision: Decision, supply: Supply, current: dict[int, Placement]) -> Placed:
        return _NOTHING


_NOTHING = Placed({})
