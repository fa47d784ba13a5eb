"""What happens to jobs and nodes: the scheduler's only input besides the clock."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.core.job import Job
from shoal.core.profile import Profile


@dataclass(frozen=True, slots=True)
class Submitted:
    """A job arrives. `job_id` grows with each submission: it is the order of submission."""

    job_id: int
    job: Job
    profile: Profile


@dataclass(frozen=True, slots=True)
class Finished:
    """A job has ended by itself; its GPUs are free. It gets no command."""

    job_id: int


@dataclass(frozen=True, slots=True)
class Cancelled:
    """A job was cancelled; whoever reports this stops its workers. It gets no command."""

    job_id: int


@dataclass(frozen=True, slots=True)
class Held:
    """The owner holds a job (`held`) or releases it. A job that is held gets a command to pause."""

    job_id: int
    held: bool


@dataclass(frozen=True, slots=True)
class Rescaled:
    """The owner changes the range of a job."""

    job_id: int
    min_gpus: int
    max_gpus: int
    #: What it is to have of policies that do not resize; None: as before, as far as the range allows.
    requested_gpus: int | None = None
    #: What is known of its speed for the new range; None: as before.
    profile: Profile | None = None


@dataclass(frozen=True, slots=True)
class Measured:
    """What is known of a job's speed has changed."""

    job_id: int
    profile: Profile


@dataclass(frozen=True, slots=True)
class Capped:
    """The autoscaler wants no more than so many GPUs for a job (None: any number), and says why."""

    job_id: int
    gpus: int | None
    why: str = ""


@dataclass(frozen=True, slots=True)
class NodeLost:
    """A node failed or is drained. The jobs on it lose their GPUs there, and each gets a command."""

    node: int


@dataclass(frozen=True, slots=True)
class NodeBack:
    """A node can be used again."""

    node: int


@dataclass(frozen=True, slots=True)
class TicketsChanged:
    """A user's tickets change, or a user joins (by a name not seen before)."""

    user: str
    tickets: float


@dataclass(frozen=True, slots=True)
class Timer:
    """The time a policy asked for has come."""


Event = (
    Submitted
    | Finished
    | Cancelled
    | Held
    | Rescaled
    | Measured
    | Capped
    | NodeLost
    | NodeBack
    | TicketsChanged
    | Timer
)
