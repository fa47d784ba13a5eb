"""What an executor is: it turns workers into processes on nodes, and tells how they end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """A machine that the executor can start workers on."""

    name: str
    gpus: int
    gpu_type: str
    #: True: there are no such GPUs, workers run on the CPU as if there were.
    virtual: bool
    #: Name or id of each GPU, for people.
    devices: tuple[str, ...] = ()
    rack: str = "rack0"
    domain: str = "domain0"
    #: Of each GPU; virtual ones are taken to have so much.
    gpu_memory_mb: float = 16_384.0


@dataclass(frozen=True, slots=True)
class GpuUsage:
    """What a GPU does at some moment: utilisation in per cent, and memory in use."""

    utilisation: float
    memory_mb: float


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """A worker to start. Its environment is not shown when this is printed: there may be secrets in it."""

    worker: str
    directory: Path
    node: str
    gpu: int
    command: tuple[str, ...]
    workdir: str
    env: dict[str, str] = field(repr=False)
    grace_s: float = 10.0
    #: May begin from a process that has imported the training libraries already.
    warm: bool = False


@dataclass(frozen=True, slots=True)
class Exit:
    """How a worker ended: by itself with a code, by a signal, or in a way no one saw."""

    worker: str
    code: int | None
    signal: str | None
    why: str
    #: False: it was never started.
    began: bool = True
    #: True: it ended because it was told to.
    told: bool = False
    #: How long ago, by a clock that no one sets; None if it is not known.
    ago_s: float | None = None

    @property
    def ok(self) -> bool:
        return self.code == 0


class Executor(Protocol):
    """All calls return at once. Elasticity is not here: it is in the protocol of the workers.

    Every worker that was started or adopted ends in exactly one `on_exit`.
    """

    name: str
    on_exit: Callable[[Exit], None]

    def nodes(self) -> tuple[NodeInfo, ...]:
        """The machines there are."""

    def start(self, worker: WorkerSpec) -> None:
        """Start it. That it could not be started is told by `on_exit`, too."""

    def stop(self, worker: str, *, kill: bool = False) -> None:
        """Ask it to end, and end it after its grace period; with `kill` at once. No part of it survives."""

    def suspend(self, worker: str) -> None:
        """Let it stand still (and keep its memory)."""

    def wake(self, worker: str) -> None:
        """Let a suspended worker go on."""

    def warm_up(self) -> None:
        """Get ready to start warm workers, if that is possible; called when the first live job arrives."""

    def usage(self) -> dict[tuple[str, int], GpuUsage]:
        """What each GPU, by node and index, does now; those of which that is not known are left out.

        May take a while: it is called in a thread of its own.
        """

    def close(self) -> None:
        """The control plane ends; workers run on."""

    def adopt(self, worker: str, directory: Path) -> None:
        """Take over a worker that an earlier control plane started. If it has ended, `on_exit` tells how."""
