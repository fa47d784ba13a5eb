"""What the coordinator asks of its caller (effects), and what it reports (events)."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.wire.messages import Order, Report


@dataclass(frozen=True, slots=True)
class WorkerReady:
    """A worker has prepared and waits to join."""

    worker: str


@dataclass(frozen=True, slots=True)
class GenerationCommitted:
    """All members work in this generation with the whole state, and all leavers have left."""

    generation: int
    members: tuple[str, ...]
    step: int
    kind: str


@dataclass(frozen=True, slots=True)
class PauseMeasured:
    """How long a reconfiguration stopped training on this worker."""

    worker: str
    generation: int
    pause_s: float


@dataclass(frozen=True, slots=True)
class WorkerLost:
    worker: str
    why: str
    was_member: bool


@dataclass(frozen=True, slots=True)
class WorkerRefused:
    """A newcomer could not join. The job continues without it."""

    worker: str
    why: str


@dataclass(frozen=True, slots=True)
class WorkerLeft:
    """A worker left the job at a switch. Its GPU is free when its process has ended."""

    worker: str


@dataclass(frozen=True, slots=True)
class Measured:
    worker: str
    report: Report


@dataclass(frozen=True, slots=True)
class StragglerFound:
    """Emitted once per worker. To replace it, set a target with a new worker instead of it."""

    worker: str
    relative_speed: float


@dataclass(frozen=True, slots=True)
class Checkpointed:
    path: str
    step: int


@dataclass(frozen=True, slots=True)
class JobPaused:
    path: str
    step: int


@dataclass(frozen=True, slots=True)
class JobStranded:
    """No worker is left that holds the state. A new target starts from `checkpoint`, or from the beginning."""

    checkpoint: str | None
    why: str


@dataclass(frozen=True, slots=True)
class JobFinished:
    step: int
    stopped: str | None = None  # where, if the script ended before its last epoch


@dataclass(frozen=True, slots=True)
class JobFailed:
    worker: str
    why: str


JobEvent = (
    WorkerReady
    | GenerationCommitted
    | PauseMeasured
    | WorkerLost
    | WorkerRefused
    | WorkerLeft
    | Measured
    | StragglerFound
    | Checkpointed
    | JobPaused
    | JobStranded
    | JobFinished
    | JobFailed
)


@dataclass(frozen=True, slots=True)
class Send:
    worker: str
    order: Order


@dataclass(frozen=True, slots=True)
class StartWorker:
    worker: str


@dataclass(frozen=True, slots=True)
class StopWorker:
    """End the worker's process. `kill`: it may hang, so kill it at once."""

    worker: str
    kill: bool
    why: str


@dataclass(frozen=True, slots=True)
class Emit:
    event: JobEvent


Effect = Send | StartWorker | StopWorker | Emit
