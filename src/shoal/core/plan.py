"""Shares, placements, commands and plans: what the scheduler decides, as values."""

from __future__ import annotations

from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class Plan:
    """The outcome of one cycle: commands to carry out, and when to be called again."""

    number: int
    now_s: float
    commands: tuple[Reconfigure, ...]
    #: When the policy wants to decide again though nothing happens; infinity for never.
    wake_s: float
    #: What caused this plan: ids of the events taken in.
    causes: tuple[int, ...] = ()
