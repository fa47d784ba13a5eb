"""Shares, placements, commands and plans: the values that the scheduler decides."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
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

#: A change of share as a line of numbers: the columns of `Plan.changes`. `ROW` is the job's row in the view when the
#: plan was made, or -1 for a job that is held and has no row.
CHANGE_COLUMNS = 7
ROW, JOB, GPUS, TYPE, SERVERS, GENERATION, VERB = range(CHANGE_COLUMNS)
NO_CHANGES: NDArray[np.int64] = np.empty((0, CHANGE_COLUMNS), np.int64)


class CauseKind(enum.StrEnum):
    """Why a share changes."""

    DECIDED = "Decided"  #: the policy or the placement changed it
    HELD = "Held"  #: the owner holds the job
    LIMIT = "Limit"  #: a limit of its user or group, or a condition of the job, does not let it run
    NODE_LOST = "NodeLost"  #: a node of the job was lost or drained
    MEASURING = (
        "Measuring"  #: a trial of exploration: the job, or one that exchanges GPUs with it, is measured
    )


@dataclass(frozen=True, slots=True)
class Cause:
    """Why a command was given. `event` is the number of the event that forced the change, if one did."""

    kind: CauseKind = CauseKind.DECIDED
    event: int | None = None
    node: int | None = None


DECIDED = Cause()


@dataclass(frozen=True, slots=True)
class Reconfigure:
    """The one command that changes a job's workers: move it to `generation` with this share and placement.

    Start, grow, shrink, migrate, pause and resume are all this command; `verb` names the case.
    """

    job: int
    generation: int
    share: Share
    placement: Placement
    verb: str
    #: Number of the plan that contains it; `Plan.causes` are the events that led to the plan.
    plan: int
    cause: Cause = DECIDED


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


@dataclass(frozen=True, slots=True)
class TrialNote:
    """A job is measured at another size from now on (`began`), or was; see `scheduler.exploration`."""

    job_id: int
    began: bool
    sentence: str
    gpus: int
    gpu_type: str
    steps: int


@dataclass(frozen=True, eq=False)
class Plan:
    """The result of one cycle: the commands to carry out, and when to be called again.

    The commands are the whole difference between the shares and placements before the cycle's events and those
    after its decision, for every job that is still there. A job that finished or was cancelled has left with its
    share; it gets no command.
    """

    number: int
    now_s: float
    #: [change, column]: the changes as numbers, releases first.
    changes: NDArray[np.int64]
    #: When the policy wants to decide again if no event comes first; infinity for never.
    wake_s: float
    #: Numbers of the events that led to this plan.
    causes: range
    #: The names behind the type numbers in `changes`.
    gpu_types: tuple[str, ...]
    #: The placements of the jobs that change; empty in a pool.
    where: Mapping[int, Placement]
    #: By job: changes that an event forced, rather than the policy.
    forced: Mapping[int, Cause] = field(default_factory=dict)
    #: Trials that began or ended.
    trials: tuple[TrialNote, ...] = ()

    @cached_property
    def commands(self) -> tuple[Reconfigure, ...]:
        """The changes as objects. Built on demand, because most simulations read `changes`."""
        return tuple([self._command(*change) for change in self.changes.tolist()])

    def _command(
        self, row: int, job: int, gpus: int, gpu_type: int, servers: int, generation: int, verb: int
    ) -> Reconfigure:
        share = _share(gpus, self.gpu_types[gpu_type], servers) if gpus else NO_SHARE
        where = self.where.get(job, ())
        return Reconfigure(
            job, generation, share, where, VERBS[verb], self.number, self.forced.get(job, DECIDED)
        )
