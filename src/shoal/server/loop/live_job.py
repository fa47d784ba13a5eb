"""An unfinished job as the server holds it in memory, and its row in the store."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from shoal.core.job import GpuRange
from shoal.server.api.models import JobRef, JobState, Resize
from shoal.server.loop.devices import Device
from shoal.server.loop.lifecycle import Life

#: State that is saved beside a job's progress, so that another server can continue with it: attribute -> saved name.
_SAVED = {
    name: name
    for name in (
        *("next_worker", "ending", "size", "search", "needs", "host", "shared", "used"),
        *("failures", "again_s", "began_s", "last_loss", "warned", "timed_out"),
        *("losses", "vain_losses", "furthest_step", "restarts_before"),
        *("reached_step", "reached_loss", "state_directory"),
    )
} | {"asked_to_end": "told", "prescheduled": "early", "colocated": "lodges"}
#: States of a worker. The store calls a suspended worker "stopped".
STARTING, READY, ACTIVE, SUSPENDED, LEAVING = "starting", "ready", "active", "stopped", "leaving"


@dataclass(slots=True)
class LiveWorker:
    """One process of a job. A SUSPENDED one has no GPU. A LEAVING one was asked to end."""

    id: str
    device: Device
    node: str
    started_s: float
    rank: int | None = None
    state: str = STARTING
    #: It is slow: a new worker replaces it at the next switch.
    is_replaced: bool = False
    #: The worker whose place it takes. Limits count the two as one while both hold GPUs.
    replaces: str | None = None
    #: It is on a GPU that another job holds; it holds none itself.
    colocated: bool = False
    #: Further GPUs of the same node, if it is the only process of its job there.
    more_gpus: tuple[int, ...] = ()

    @property
    def holds_gpu(self) -> bool:
        return self.state != SUSPENDED and not self.colocated

    @property
    def devices(self) -> list[Device]:
        """All its GPUs, whether it holds them now or not."""
        return [self.device, *((self.device[0], gpu) for gpu in self.more_gpus)]

    @property
    def gpus(self) -> int:
        """GPUs that it holds."""
        return len(self.devices) if self.holds_gpu else 0


@dataclass(slots=True)
class Progress:
    """The progress that a job reports."""

    step: int | None = None
    total_steps: int | None = None
    speed: float | None = None
    values: dict[str, float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "total_steps": self.total_steps,
            "speed": self.speed,
            "values": self.values,
        }


@dataclass(slots=True)
class LiveJob:
    id: int
    name: str
    user: str
    spec: dict[str, Any]
    given: list[str]
    min_gpus: int
    max_gpus: int
    requested_gpus: int
    resize: Resize
    model: str
    life: Life
    #: The share that was last decided, as GPUs by node index. Only `targets` sets it.
    target: dict[int, int] = field(default_factory=dict)
    gpu_type: str | None = None
    generation: int = 0
    coordinator: dict[str, Any] | None = None
    progress: Progress = field(default_factory=Progress)
    checkpoint_s: float | None = None
    stalled_s: float = 0.0
    resizes: int = 0
    exit_code: int | None = None
    signal: str | None = None
    workers: dict[str, LiveWorker] = field(default_factory=dict)
    #: Number of the next worker: ids are never used again, also not after a restart of the server.
    next_worker: int = 0
    #: The plan that set the target.
    plan: int | None = None
    #: Why the workers are being stopped: the outcome is decided, the last processes are ending.
    ending: str | None = None
    #: A worker of this attempt ended because it was asked to, so the attempt ends without a result.
    asked_to_end: bool = False
    #: The state of its autoscaler, if it has one.
    search: dict[str, Any] | None = None
    #: What it uses of one GPU and how long its phases are, as far as known when it was submitted.
    needs: dict[str, Any] | None = None
    #: The job whose GPU it shares: it is co-located or, if `prescheduled`, prepares there. None if it shares none.
    host: int | None = None
    prescheduled: bool = False
    #: Its worker is on that GPU.
    colocated: bool = False
    #: The step and the loss at which it reached its target: it ends after its next checkpoint.
    reached_step: int | None = None
    reached_loss: float | None = None
    #: It has shared a GPU, so its measurements say nothing about its speed alone.
    shared: bool = False
    #: What it used of its GPU by measurement, once it is over.
    used: dict[str, float] | None = None
    #: The array that it is a task of, and its number there.
    array: int | None = None
    array_index: int | None = None
    #: It was warned that its time limit is near; it was ended at its time limit.
    warned: bool = False
    timed_out: bool = False
    #: Workers of the last generation that was committed; of a fixed job, the GPUs that it began with.
    size: int = 0
    #: Slow workers that were given another GPU.
    replaced: int = 0
    #: Where its state is, apart from the home; empty: in its directory there. None: it has not begun, or it began under
    #: an earlier version. It stays although new jobs may have theirs elsewhere by now.
    state_directory: str | None = None
    #: What goes wrong with it; `restarts` says what raises and resets these, and nobody else writes them.
    failures: int = 0
    losses: int = 0
    vain_losses: int = 0
    #: The furthest step that it ever completed, and how often it had been restarted then.
    furthest_step: int = -1
    restarts_before: int = 0
    #: Its new workers fail: no more are started before this time; None: they are. Only `restarts` sets it.
    grows_s: float | None = None
    #: See `caps`: by cause, the most GPUs and why.
    caps: dict[str, tuple[int, str]] = field(default_factory=dict)
    #: It failed and starts again at this time; None: it does not rest. Only `restarts` sets it.
    again_s: float | None = None
    #: When its present attempt began.
    began_s: float | None = None
    #: How its last worker was lost.
    last_loss: str = ""
    #: Its last worker to end could not be started.
    is_unbegun: bool = False

    @property
    def step_gpus(self) -> int:
        """It can have only multiples of this. It follows from how the script shards its model, so it never changes."""
        return GpuRange.step_of(self.spec.get("gpus", ""))

    @property
    def range(self) -> GpuRange:
        return GpuRange(self.min_gpus, self.max_gpus, self.step_gpus)

    @property
    def wanted(self) -> dict[int, int]:
        """The GPUs by node that the job is to have now: its target, unless it is held, rests, is cancelled or over."""
        if (
            self.again_s is not None
            or self.life.state in (JobState.PAUSED, JobState.STOPPING)
            or self.is_over
        ):
            return {}
        return self.target

    @property
    def target_gpus(self) -> int:
        return sum(self.wanted.values())

    @property
    def gpus(self) -> int:
        return sum(w.gpus for w in self.workers.values())

    @property
    def is_to_leave(self) -> bool:
        """It is on the GPU of another job, must leave it, and has no GPU of its own."""
        return self.colocated and self.host is None and not self.target

    @property
    def is_over(self) -> bool:
        return self.life.state.is_final

    def new_worker_id(self) -> str:
        number, self.next_worker = self.next_worker, self.next_worker + 1
        return f"{self.id}.{number}"

    def row(self) -> dict[str, Any]:
        """What the store keeps of it, besides its target and what never changes."""
        life = self.life
        return {
            "id": self.id,
            "state": life.state.value,
            "message": life.message,
            "min_gpus": self.min_gpus,
            "max_gpus": self.max_gpus,
            "requested_gpus": self.requested_gpus,
            "gpus": life.gpus,
            "target_gpus": self.target_gpus,
            "gpu_type": self.gpu_type,
            "generation": self.generation,
            "coordinator": self.coordinator,
            "progress": self.progress.to_dict() | self._memory(),
            "settled_s": life.settled_s,
            "started_s": life.started_s,
            "finished_s": life.finished_s,
            "checkpoint_s": self.checkpoint_s,
            "waiting_s": life.waiting_s,
            "running_s": life.running_s,
            "paused_s": life.paused_s,
            "stalled_s": self.stalled_s,
            "gpu_s": life.gpu_s,
            "resizes": self.resizes,
            "restarts": life.restarts,
            "exit_code": self.exit_code,
            "signal": self.signal,
        }

    def whole_row(self) -> dict[str, Any]:
        """Its row in the store, without its target."""
        fixed = ("name", "user", "spec", "given", "model", "array", "array_index")
        row = {name: getattr(self, name) for name in fixed} | self.row()
        return row | {"resize": self.resize.value, "submitted_s": self.life.submitted_s}

    def _memory(self) -> dict[str, Any]:
        return {saved: getattr(self, name) for name, saved in _SAVED.items()}

    @classmethod
    def from_row(cls, row: dict[str, Any], target: dict[int, int]) -> LiveJob:
        """`target`: that of the row, by indexes of nodes."""
        life = Life(
            state=JobState(row["state"]),
            submitted_s=row["submitted_s"],
            settled_s=row["settled_s"],
            message=row["message"],
            gpus=row["gpus"],
            started_s=row["started_s"],
            finished_s=row["finished_s"],
            waiting_s=row["waiting_s"],
            running_s=row["running_s"],
            paused_s=row["paused_s"],
            gpu_s=row["gpu_s"],
            restarts=row["restarts"],
        )
        kept = dict(row["progress"])
        memory = {name: kept.pop(saved) for name, saved in _SAVED.items() if saved in kept}
        return cls(
            id=row["id"],
            name=row["name"],
            user=row["user"],
            spec=row["spec"],
            given=row["given"],
            min_gpus=row["min_gpus"],
            max_gpus=row["max_gpus"],
            requested_gpus=row["requested_gpus"],
            resize=Resize(row["resize"]),
            model=row["model"],
            life=life,
            target=target,
            gpu_type=row["gpu_type"],
            generation=row["generation"],
            coordinator=row["coordinator"],
            progress=Progress(**kept),
            checkpoint_s=row["checkpoint_s"],
            stalled_s=row["stalled_s"],
            resizes=row["resizes"],
            exit_code=row["exit_code"],
            signal=row["signal"],
            array=row["array"],
            array_index=row["array_index"],
            **memory,
        )


def job_ref(job: LiveJob, may_see: bool = True) -> JobRef:
    """The job in an answer about another; `may_see`: the asker may know its name."""
    return JobRef(
        id=job.id,
        name=job.name if may_see else None,
        user=job.user,
        state=job.life.state,
        gpus=job.gpus,
        target_gpus=job.target_gpus,
        min_gpus=job.min_gpus,
        max_gpus=job.max_gpus,
        step_gpus=job.step_gpus,
    )
