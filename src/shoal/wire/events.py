"""What the coordinator asks of its surroundings (effects) and tells them (events)."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.wire.messages import Order, Report


@dataclass(frozen=True, slots=True)
class WorkerReady:
    """A worker has prepared and waits to be taken in."""

    worker: str


@dataclass(frozen=True, slots=True)
class GenerationCommitted:
    """All members work in this generation, and those who were to leave have left."""

    generation: int
    members: tuple[str, ...]
    step: int
    kind: str


@dataclass(frozen=True, slots=True)
class PauseMeasured:
    """How long training stood still on this worker because of a reconfiguration."""

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
    """A newcomer could not be taken in; the job goes on as it was."""

    worker: str
    why: str


@dataclass(frozen=True, slots=True)
class WorkerLeft:
    """A worker gave up its place at a switch; its GPU is free when its process has ended."""

    worker: str


@dataclass(frozen=True, slots=True)
class Measured:
    worker: str
    report: Report


@dataclass(frozen=True, slots=True)
class StragglerFound:
    """Reported once per worker; replace it by a target without it and with a new one."""

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
    """No worker that holds state is left. A new target starts from `checkpoint`, or from the beginning."""

    checkpoint: str | None
    why: str


@dataclass(frozen=True, slots=True)
class JobFinished:
    step: int


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
    """End the worker's process. `kill`: it may be hung, do not ask it first."""

    worker: str
    kill: bool
    why: str


@dataclass(frozen=True, slots=True)
class Emit:
    event: JobEvent


Effect = Send | StartWorker | StopWorker | Emit
