"""Shares, placements, commands and plans: what the scheduler decides, as values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from shoal.core.reason import Reason


@dataclass(frozen=True, slots=True)
class Share:
    """How many GPUs of one type a job has, and, for parameter-server jobs, how many servers."""

    gpus: int = 0
    gpu_type: str = ""
    servers: int = 0

    def __bool__(self) -> bool:
        return self.gpus > 0


#: Which GPUs a share is: (node index, how many of its GPUs), by ascending node. Empty for a pool.
Placement = tuple[tuple[int, int], ...]

NO_SHARE = Share()

#: A share that was given before is not made again.
_share = lru_cache(4096)(Share)

#: What a change of share is called; those that release GPUs come first.
VERBS = ("pause", "shrink", "grow", "migrate", "start", "resume")
PAUSE, SHRINK, GROW, MIGRATE, START, RESUME = range(len(VERBS))

#: A change of share as a line of numbers: the columns of `Plan.changes`. A row is that of the view when it was decided.
CHANGE_COLUMNS = 7
ROW, JOB, GPUS, TYPE, SERVERS, GENERATION, VERB = range(CHANGE_COLUMNS)
NO_CHANGES: NDArray[np.int64] = np.empty((0, CHANGE_COLUMNS), np.int64)


@dataclass(frozen=True, slots=True)
class Reconfigure:
    """The one command that changes a job's workers: lead it to `generation` with this share, there.

    Start, grow, shrink, migrate, pause and resume are all this; `verb` names which for people.
    """

    job: int
    generation: int
    share: Share
    placement: Placement
    verb: str
    #: Number of the plan that decided it; the plan's events are its causes.
    plan: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a plan means for one job. A job below its wish cannot be without a reason."""

    job: int
    share: Share
    wish_gpus: int
    reason: Reason | None

    def __post_init__(self) -> None:
        if self.share.gpus < self.wish_gpus and self.reason is None:
            raise ValueError(f"job {self.job} has {self.share.gpus} of {self.wish_gpus} GPUs and no reason")


@dataclass(frozen=True, eq=False)
class Plan:
    """The outcome of one cycle: commands to carry out, and when to be called again."""

    number: int
    now_s: float
    #: [change, column]: what changes, as numbers, releases first.
    changes: NDArray[np.int64]
    #: When the policy wants to decide again though nothing happens; infinity for never.
    wake_s: float
    #: What caused this plan: ids of the events taken in.
    causes: range
    #: What the numbers of types mean, and where the jobs that change are to be (nowhere in particular in a pool).
    gpu_types: tuple[str, ...]
    where: Mapping[int, Placement]

    @cached_property
    def commands(self) -> tuple[Reconfigure, ...]:
        """The changes for those who carry them out; made when asked for, as most simulations do with the numbers."""
        return tuple([self._command(*change) for change in self.changes.tolist()])

    def _command(
        self, row: int, job: int, gpus: int, gpu_type: int, servers: int, generation: int, verb: int
    ) -> Reconfigure:
        share = _share(gpus, self.gpu_types[gpu_type], servers) if gpus else NO_SHARE
        return Reconfigure(job, generation, share, self.where.get(job, ()), VERBS[verb], self.number)
