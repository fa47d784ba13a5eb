"""Events of jobs and nodes: the only input of the scheduler besides the time."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.core.cluster import Group, User
from shoal.core.job import Job
from shoal.core.profile import Profile


@dataclass(frozen=True, slots=True)
class Submitted:
    """A job arrives. `job_id` increases with each submission, so it is the order of submission."""

    job_id: int
    job: Job
    profile: Profile


@dataclass(frozen=True, slots=True)
class Finished:
    """A job has ended by itself; its GPUs are free. It gets no command."""

    job_id: int
    #: Whether it ended well. Jobs that wait for it depend on that.
    succeeded: bool = True


@dataclass(frozen=True, slots=True)
class WorkerFailed:
    """A worker of a running job failed or was lost. The job goes on, rests or ends; other events say so."""

    job_id: int


@dataclass(frozen=True, slots=True)
class Cancelled:
    """A job was cancelled; whoever reports this stops its workers. It gets no command."""

    job_id: int
    #: False: its workers are still ending. `Finished` follows, and jobs that wait for it wait until then.
    ended: bool = True


@dataclass(frozen=True, slots=True)
class Held:
    """The owner holds a job (`held`) or releases it. A job that is held gets a command to pause."""

    job_id: int
    held: bool


@dataclass(frozen=True, slots=True)
class Rescaled:
    """The owner changes the GPU range of a job."""

    job_id: int
    min_gpus: int
    max_gpus: int
    #: Its size under policies that do not resize; None: the current one, clipped to the new range.
    requested_gpus: int | None = None
    #: Its speed for the new range; None: unchanged.
    profile: Profile | None = None


@dataclass(frozen=True, slots=True)
class Measured:
    """The profile of a job has changed."""

    job_id: int
    profile: Profile


@dataclass(frozen=True, slots=True)
class Capped:
    """The autoscaler limits a job to this many GPUs (None: no limit) for this reason."""

    job_id: int
    gpus: int | None
    why: str = ""


@dataclass(frozen=True, slots=True)
class NodeLost:
    """A node failed or is drained. The jobs on it lose their GPUs there, and each gets a command."""

    node: int


@dataclass(frozen=True, slots=True)
class NodeBack:
    """A node is usable again."""

    node: int


@dataclass(frozen=True, slots=True)
class TicketsChanged:
    """The tickets of a user change. An unknown name adds a user."""

    user: str
    tickets: float


@dataclass(frozen=True, slots=True)
class PeopleChanged:
    """Tickets, limits or groups of these users change. `groups` are all groups from now on."""

    users: tuple[User, ...]
    groups: tuple[Group, ...]


@dataclass(frozen=True, slots=True)
class Timer:
    """The time that a policy asked for has been reached."""


Event = (
    Submitted
    | Finished
    | WorkerFailed
    | Cancelled
    | Held
    | Rescaled
    | Measured
    | Capped
    | NodeLost
    | NodeBack
    | TicketsChanged
    | PeopleChanged
    | Timer
)
