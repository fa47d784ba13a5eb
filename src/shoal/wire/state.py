"""The state of the coordinator of one job, and how it is saved.

`CoordinatorState` is plain data. Only the functions in `coordinator`, `inputs`, `planning`, `losses` and `ending`
change it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from shoal.wire.groups import group_size
from shoal.wire.messages import Kind, Order, Phase, Plan, Status
from shoal.wire.straggler import StragglerRule


@dataclass(frozen=True, slots=True)
class Timing:
    """Time-outs in seconds."""

    heartbeat_timeout_s: float = 6.0  # a worker whose process stands still (SIGSTOP, lost host)
    away_timeout_s: float = 60.0  # the same outside its steps, where a script may hold Python's lock for long
    reconnect_s: float = 3.0  # a worker whose connection closed, if nothing else shows that it died
    restored_s: float = 30.0  # the same after a restart of the coordinator: the machine may be busy then
    settle_s: float = 0.5  # a broken step, if no worker is known to be lost
    hang_s: float = 120.0  # a worker that is alive but does not arrive at a step where the others wait
    away_s: float = 3600.0  # the same while it evaluates or saves
    start_s: float = 600.0  # a newcomer that does not become ready


@dataclass(slots=True)
class WorkerView:
    """What the coordinator knows about a worker."""

    worker: str
    since_s: float
    connected: bool = False
    alive: bool = True
    stopping: bool = False
    why: str = "no longer wanted"  # the reason, if it is stopping
    met: bool = False  # it has connected at least once
    heard_s: float = 0.0  # when its last message arrived
    back_by_s: float = 0.0  # after a restart of the coordinator: until then it may be on its way back
    arrived: int = 0  # the step whose synchronisation it has entered
    arrived_s: float = 0.0
    halted_s: float = 0.0
    announced: bool = False  # WorkerReady has been emitted for it
    status: Status = field(default_factory=lambda: Status(seq=0, phase=Phase.STARTING))
    sent: Order = field(default_factory=lambda: Order(seq=0))


@dataclass(frozen=True, slots=True)
class Generation:
    number: int
    members: tuple[str, ...]


@dataclass(slots=True)
class Pending:
    """The generation that the job prepares to switch to."""

    plan: Plan
    committed: bool = False


@dataclass(slots=True)
class CoordinatorState:
    job: str
    pause_path: str = ""  # where a pause saves the job's state
    #: The workers the job shall have, and whether an empty target means a pause.
    target: tuple[str, ...] = ()
    pausing: bool = False
    #: The generation that trains, and the one that is being prepared.
    active: Generation | None = None
    pending: Pending | None = None
    #: The kind of the active generation until `GenerationCommitted` has been emitted for it.
    unannounced: Kind | None = None
    recovering: bool = False
    #: All workers that may hold state, in rank order.
    participants: tuple[str, ...] = ()
    #: Generations up to this number are dead.
    dead: int = 0
    #: The highest generation number in use.
    issued: int = 0
    signature: tuple[str, ...] | None = None
    checkpoint: str | None = None
    checkpoint_step: int = 0
    checkpoints_asked: int = 0
    paused: str | None = None  # where the state of the paused job is
    outcome: str | None = None  # finished, failed or stopped
    stranded: bool = False
    workers: dict[str, WorkerView] = field(default_factory=dict)
    #: Not saved.
    #: The step that broke last, and how often it did so without a lost worker.
    broken_step: int = -1
    vain_breaks: int = 0
    timing: Timing = field(default_factory=Timing)
    stragglers: StragglerRule = field(default_factory=StragglerRule)

    def alive(self, workers: Iterable[str]) -> list[WorkerView]:
        """The views of those of `workers` that are alive."""
        return [v for w in workers if (v := self.workers.get(w)) is not None and v.alive]

    @property
    def group(self) -> int:
        """So many workers share one sharded model; 1 if each has all of it."""
        return group_size(self.signature)

    def learners(self) -> list[str]:
        """Members of the active generation that have received only part of the state."""
        if self.active is None:
            return []
        views = [v for w in self.active.members if (v := self.workers.get(w)) is not None]
        return [v.worker for v in views if v.status.partial and v.status.generation == self.active.number]

    def break_generation(self) -> None:
        """Declare all generations dead. The survivors halt; a recovery generation follows."""
        self.recovering, self.dead = True, self.issued
        self.pending = self.unannounced = None

    def to_dict(self) -> dict[str, Any]:
        """Everything that a later coordinator needs to take over this job's workers. JSON-ready."""
        saved: dict[str, Any] = {key: getattr(self, name) for name, key in _SAVED.items()}
        saved["workers"] = {
            v.worker: {name: getattr(v, name) for name in _SAVED_OF_WORKER} for v in self.workers.values()
        }
        # Through JSON, so that it equals what is read back: lists, not tuples.
        plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(saved))
        return plain

    @staticmethod
    def from_dict(saved: dict[str, Any], now_s: float, timing: Timing | None = None) -> CoordinatorState:
        """Restore a saved state. Its workers have `restored_s` from now on to reconnect."""
        timing = timing or Timing()
        raw = {name: saved[key] for name, key in _SAVED.items() if key in saved}
        seen_now = {"since_s": now_s, "heard_s": now_s, "back_by_s": now_s + timing.restored_s}
        raw["workers"] = {w: {**view, "worker": w, **seen_now} for w, view in saved["workers"].items()}
        state = msgspec.convert(raw, CoordinatorState)
        state.timing = timing
        return state


#: Field -> its key in the saved dictionary. Two keys keep the names that released versions have written.
_SAVED = {
    **{
        name: name
        for name in (
            *("job", "pause_path", "target", "pausing", "active", "pending", "recovering", "dead", "issued"),
            *("signature", "checkpoint", "checkpoint_step", "checkpoints_asked"),
            *("paused", "outcome", "stranded"),
        )
    },
    "unannounced": "untold",
    "participants": "crew",
}
_SAVED_OF_WORKER = ("alive", "stopping", "why", "announced", "met")
