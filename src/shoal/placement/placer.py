"""The placer interface. A placer turns shares into GPUs on nodes and keeps running jobs in place if it can."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from shoal.core.decision import Decision
from shoal.core.plan import Placement
from shoal.core.supply import Supply
from shoal.core.view import View


@dataclass(frozen=True, slots=True)
class Placed:
    """The result of one placement."""

    #: New placement of each job (by id) that starts, changes or moves. Other jobs keep theirs.
    placements: dict[int, Placement]
    #: GPUs that a job (by id) got, for jobs that got fewer than decided because their share did not fit.
    cut: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Unplaced:
    """Result for a job that fits nowhere, with the reason."""

    because: str


class Placer(Protocol):
    """Chooses GPUs for the shares of a decision."""

    def place(self, view: View, decision: Decision, supply: Supply, current: dict[int, Placement]) -> Placed:
        """Place the shares. `current` is the placement of each running job, by id."""


class PoolPlacer:
    """Placer for a cluster without nodes: every share within the supply fits."""

    def place(self, view: View, decision: Decision, supply: Supply, current: dict[int, Placement]) -> Placed:
        return _NOTHING


_NOTHING = Placed({})
