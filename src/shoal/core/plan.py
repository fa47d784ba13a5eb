"""Shares, placements, commands and plans: the values that the scheduler decides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from shoal.core.reason import Reason


@dataclass(frozen=True, slots=True)
class Share:
    """The number of GPUs of one type that a job has and, for parameter-server jobs, the number of servers."""

    gpus: int = 0
    gpu_type: str = ""
    servers: int = 0

    def __bool__(self) -> bool:
        return self.gpus > 0


#: The GPUs of a share: (node index, number of its GPUs), by ascending node. Empty for a pool.
Placement = tuple[tuple[int, int], ...]

NO_SHARE = Share()

#: Reuses equal shares.
_share = lru_cache(4096)(Share)

#: The names of share changes. Those that release GPUs come first.
VERBS = ("pause", "shrink", "grow", "migrate", "start", "resume")
PAUSE, SHRINK, GROW, MIGRATE, START, RESUME = range(len(VERBS))

#: The columns of `Plan.changes`. ROW is the row of the job in the view at the time of the decision.
CHANGE_COLUMNS = 7
ROW, JOB, GPUS, TYPE, SERVERS, GENERATION, VERB = range(CHANGE_COLUMNS)
NO_CHANGES: NDArray[np.int64] = np.empty((0, CHANGE_COLUMNS), np.int64)


@dataclass(frozen=True, slots=True)
class Reconfigure:
    """The only command that changes a job's workers: reconfigure to `generation` with this share and placement.

    Start, grow, shrink, migrate, pause and resume are all this command; `verb` names which one, for display.
    """

    job: int
    generation: int
    share: Share
    placement: Placement
    verb: str
    #: Number of the plan that contains it; the causes are the events of that plan.
    plan: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a plan for one job. A job below its wish always has a reason."""

    job: int
    share: Share
    wish_gpus: int
    reason: Reason | None

    def __post_init__(self) -> None:
        if self.share.gpus < self.wish_gpus and self.reason is None:
            raise ValueError(f"job {self.job} has {self.share.gpus} of {self.wish_gpus} GPUs and no reason")


@dataclass(frozen=True, eq=False)
class Plan:
    """The result of one cycle: commands to carry out, and the time of the next decision."""

    number: int
    now_s: float
    #: [change, column]: the changes as numbers, those that release GPUs first.
    changes: NDArray[np.int64]
    #: When the policy decides again even if no event occurs; infinity for never.
    wake_s: float
    #: Ids of the events that caused this plan.
    causes: range
    #: Names of the GPU types by index, and the placements of the jobs that change (empty in a pool).
    gpu_types: tuple[str, ...]
    where: Mapping[int, Placement]

    @cached_property
    def commands(self) -> tuple[Reconfigure, ...]:
        """The changes as commands. Built on first access, because most simulations only use the numbers."""
        return tuple([self._command(*change) for change in self.changes.tolist()])

    def _command(
        self, row: int, job: int, gpus: int, gpu_type: int, servers: int, generation: int, verb: int
    ) -> Reconfigure:
        share = _share(gpus, self.gpu_types[gpu_type], servers) if gpus else NO_SHARE
        return Reconfigure(job, generation, share, self.where.get(job, ()), VERBS[verb], self.number)
