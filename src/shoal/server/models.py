"""What the API takes and gives, as pydantic models. These words are also what the CLI prints with `-o json`.

Within v1 fields are only ever added. Timestamps are RFC 3339 in UTC, durations are seconds, lists are
`{"items": [...], "next": cursor or null}`, and an error is one object `{"error": {...}}`.
"""

from __future__ import annotations

import math
import re
from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any, Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, field_validator, model_validator

from shoal.core.errors import ShoalError
from shoal.core.job import GpuRange
from shoal.core.reason import Reason as CoreReason

NAME = r"^[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?$"
ENV_NAME = r"^[A-Za-z_][A-Za-z0-9_]{0,127}$"
MAX_COMMAND_BYTES = 64 * 1024

Name = Annotated[str, StringConstraints(pattern=NAME)]
EnvName = Annotated[str, StringConstraints(pattern=ENV_NAME)]
#: Values given to a process: no NUL, which no process can be given.
EnvValue = Annotated[str, StringConstraints(max_length=32 * 1024, pattern=r"^[^\x00]*$")]
Item = TypeVar("Item")


class Given(BaseModel):
    """Something a client sends: an unknown field is an error, not a surprise."""

    model_config = ConfigDict(extra="forbid")


class Page(BaseModel, Generic[Item]):
    """One page of a list. Ask again with `cursor` set to `next` for the rest; null means there is no more."""

    items: list[Item]
    next: str | None = None


class ErrorBody(BaseModel):
    #: A word for programs: unauthorized, not_found, conflict, invalid, infeasible, ... (docs/api.md)
    code: str
    #: One line for people.
    message: str
    #: What to do about it, where there is something to do.
    hint: str | None = None
    #: Which field of the request, where one is to blame: `spec.gpus`.
    field: str | None = None


class Error(BaseModel):
    error: ErrorBody

    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "error": {
                    "code": "not_found",
                    "message": "there is no job 'resnet'",
                    "hint": "`shoal ps -a` lists the jobs you may see",
                }
            }
        }
    )


class JobState(StrEnum):
    """Where a job is in its life. What may follow what is in `shoal.server.lifecycle`."""

    PENDING = "pending"  # has no GPUs and wants some; `reason` says why not, also after it was preempted
    STARTING = "starting"  # has GPUs; its workers prepare
    RUNNING = "running"  # trains
    PAUSED = "paused"  # its owner holds it back; it has no GPUs
    STOPPING = "stopping"  # is being cancelled; its workers are ending
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_final(self) -> bool:
        return self in (JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED)


class Resize(StrEnum):
    """How a job may change size."""

    LIVE = "live"  # it uses shoal.torch: resized while it trains
    RESTART = "restart"  # stopped and started again at another size, from its own checkpoint
    NEVER = "never"  # a fixed size; it can only be paused


#: In place of a number of GPUs: the server chooses by what it knows of such jobs.
AUTO = "auto"


class JobSpec(Given):
    """What a user submits."""

    name: Name | None = Field(
        None, description="Unique among your unfinished jobs; made from the command if left out."
    )
    command: list[Annotated[str, StringConstraints(pattern=r"^[^\x00]*$")]] = Field(
        min_length=1, max_length=1024, description="Program and arguments; no shell."
    )
    workdir: str = Field("/", max_length=4096, description="Absolute path; the command starts there.")
    gpus: str = Field(
        "1", max_length=32, description="`4`, a range `1..8`, or `auto`: by what is known of such jobs."
    )
    requested_gpus: int | None = Field(
        None, ge=1, le=1_000_000, description="What policies that do not resize give it; the max if left out."
    )
    resize: Resize | None = Field(
        None, description="`live` if gpus is a range and `never` otherwise, if left out."
    )
    gpu_types: list[Name] = Field(default_factory=list, max_length=32, description="Empty: any type.")
    env: dict[EnvName, EnvValue] = Field(default_factory=dict, max_length=512)
    secrets: dict[EnvName, EnvValue] = Field(
        default_factory=dict, max_length=64, description="Environment whose values are never shown again."
    )
    weight: float = Field(1.0, gt=0, le=1e6, description="Among your own jobs.")
    model: str | None = Field(
        None, max_length=200, description="Jobs with the same word share what is learned of their speed."
    )
    iterations: float | None = Field(None, gt=0, le=1e15, description="Total steps, if you know them.")
    expected_s: float | None = Field(
        None, gt=0, le=1e9, description="How long it takes at `requested_gpus`, if you know."
    )
    target_loss: float | None = Field(
        None, description="The job is done when the loss it logs gets there; used to estimate what is left."
    )
    max_restarts: int = Field(
        0, ge=0, le=1000, description="How often to start it again after it failed or lost all workers."
    )
    replace_stragglers: bool = Field(
        False, description="Give a worker that is plainly slower than the others another GPU, if one is free."
    )
    grace_s: float = Field(10.0, ge=0, le=3600, description="Between asking it to end and making it end.")

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "example": {
                "name": "resnet-a",
                "command": ["python", "train.py", "--epochs", "10"],
                "workdir": "/home/ada/vision",
                "gpus": "1..8",
            }
        },
    )

    @field_validator("name")
    @classmethod
    def _not_a_number(cls, name: str | None) -> str | None:
        if name is not None and name.isdigit():
            raise ValueError("a name must not be a number, because jobs are also called by their number")
        return name

    @field_validator("workdir")
    @classmethod
    def _absolute(cls, path: str) -> str:
        if not path.startswith("/") or ".." in path.split("/") or re.search(r"[\x00-\x1f\x7f]", path):
            raise ValueError("workdir must be an absolute path without '..' and control characters")
        return path

    @field_validator("command")
    @classmethod
    def _small(cls, command: list[str]) -> list[str]:
        if not command[0]:
            raise ValueError("the command's program is empty")
        if sum(len(c.encode(errors="surrogatepass")) for c in command) > MAX_COMMAND_BYTES:
            raise ValueError(f"the command is longer than {MAX_COMMAND_BYTES} bytes; put it into a script")
        return command

    @model_validator(mode="after")
    def _consistent(self) -> JobSpec:
        if self.gpus == AUTO:
            if self.requested_gpus is not None:
                raise ValueError("requested_gpus: leave it out with gpus auto, or give a range")
        else:
            self._check_range()
        twice = self.env.keys() & self.secrets.keys()
        if twice:
            raise ValueError(f"secrets: {sorted(twice)[0]} is given both in env and in secrets")
        return self

    def _check_range(self) -> None:
        try:
            gpus = GpuRange.parse(self.gpus)
        except ShoalError as error:
            raise ValueError(f"gpus: {error}, or auto") from None
        if gpus.max > 1_000_000:
            raise ValueError(f"gpus: {gpus.max} GPUs are more than any cluster has; the limit is 1000000")
        if self.requested_gpus is not None and not gpus.min <= self.requested_gpus <= gpus.max:
            raise ValueError(f"requested_gpus: {self.requested_gpus} is not within gpus {gpus}")
        if self.resize is Resize.NEVER and gpus.min != gpus.max:
            raise ValueError("gpus: a range needs resize `live` or `restart`; give one number, or say which")

    @property
    def range(self) -> GpuRange:
        return GpuRange.parse(self.gpus)

    @property
    def effective_resize(self) -> Resize:
        gpus = self.range
        return self.resize or (Resize.LIVE if gpus.max > gpus.min else Resize.NEVER)


class Reason(BaseModel):
    """Why a job does not have all it could use."""

    code: str = Field(
        description="Held, Misconfigured, Infeasible, ...: in order of precedence in docs/api.md"
    )
    sentence: str
    evidence: dict[str, float | int | str] = Field(default_factory=dict)

    @classmethod
    def of(cls, reason: CoreReason) -> Reason:
        """As the scheduler words it. JSON knows no infinity, and such a number says nothing anyway."""
        plain = {k: v.item() if hasattr(v, "item") else v for k, v in reason.evidence.items()}
        finite = {k: v for k, v in plain.items() if not isinstance(v, float) or math.isfinite(v)}
        return cls(code=reason.code.label, sentence=reason.sentence, evidence=finite)


class GpuPlace(BaseModel):
    node: str
    gpus: list[int] = Field(description="Indices of its GPUs on this node.")


class Worker(BaseModel):
    """One process of a job, bound to one GPU."""

    id: str
    rank: int | None = None
    node: str
    gpu: int
    state: Literal["starting", "ready", "active", "stopped", "leaving", "ended"]
    pid: int | None = None
    started_at: datetime
    ended_at: datetime | None = None
    exit_code: int | None = None
    signal: str | None = Field(None, description="SIGKILL, ... if a signal ended it.")


class Estimate(BaseModel):
    """A length of time with its basis. `unknown` says why there is none."""

    low_s: float | None = None
    high_s: float | None = None
    basis: str | None = None
    unknown: str | None = None


class Job(BaseModel):
    """A job as it is now."""

    id: int
    name: str
    user: str
    state: JobState
    reason: Reason | None = Field(None, description="Null only if it has all it could use, or is over.")
    message: str | None = Field(None, description="How it ended, or the last thing that went wrong.")
    # size
    gpus: int = Field(description="GPUs it holds now.")
    target_gpus: int = Field(description="GPUs it is to have; differs from `gpus` during a reconfiguration.")
    gpu_type: str | None = None
    min_gpus: int
    max_gpus: int
    requested_gpus: int
    resize: Resize
    placement: list[GpuPlace] = Field(default_factory=list)
    generation: int = 0
    workers: list[Worker] = Field(default_factory=list, description="In lists: empty. See GET /jobs/{id}.")
    # what was submitted
    command: list[str]
    workdir: str
    env: dict[str, str] = Field(default_factory=dict)
    secrets: list[str] = Field(default_factory=list, description="Names only.")
    gpu_types: list[str] = Field(default_factory=list)
    weight: float = 1.0
    model: str = ""
    max_restarts: int = 0
    replace_stragglers: bool = False
    grace_s: float = 10.0
    given: list[str] = Field(
        default_factory=list, description="Fields the owner gave; all others are defaults."
    )
    # how it goes
    step: int | None = None
    total_steps: int | None = None
    progress: float | None = Field(None, ge=0, le=1)
    speed: float | None = Field(None, description="Steps per second, measured.")
    speedup: float | None = Field(None, description="Against one GPU, measured or estimated.")
    values: dict[str, float] = Field(default_factory=dict, description="Last of each logged value: loss, ...")
    remaining: Estimate | None = None
    # times
    submitted_at: datetime
    started_at: datetime | None = None
    finished_at: datetime | None = None
    checkpoint_at: datetime | None = None
    waiting_s: float = Field(0.0, description="Without GPUs though it wanted some.")
    running_s: float = Field(0.0, description="With GPUs.")
    paused_s: float = Field(0.0, description="Held by its owner.")
    stalled_s: float = Field(0.0, description="Of the running time: training stood still for resizes.")
    gpu_s: float = Field(0.0, description="GPU-seconds received.")
    resizes: int = 0
    restarts: int = 0
    exit_code: int | None = None
    signal: str | None = None


class JobList(Page[Job]):
    """Newest first."""


class Scale(Given):
    """A new range for a job. What is left out stays."""

    min: int | None = Field(None, ge=1, le=1_000_000)
    max: int | None = Field(None, ge=1, le=1_000_000)
    pin: int | None = Field(None, ge=1, le=1_000_000, description="min and max at once.")

    @model_validator(mode="after")
    def _something(self) -> Scale:
        if self.pin is not None and (self.min is not None or self.max is not None):
            raise ValueError("give either pin, or min and max")
        if self.pin is None and self.min is None and self.max is None:
            raise ValueError("give min, max or pin")
        return self


class Cancel(Given):
    grace_s: float | None = Field(None, ge=0, le=3600, description="Instead of the job's own.")


class JobRef(BaseModel):
    """A job somewhere in a list of reasons. Another user's job has no name unless you may see it."""

    id: int
    name: str | None = None
    user: str
    state: JobState
    gpus: int
    target_gpus: int
    min_gpus: int
    max_gpus: int


class CouldDo(BaseModel):
    """The smallest change of one kind that would start or grow the job now, found by asking the planner."""

    change: Literal["min_gpus", "requested_gpus", "gpu_types", "resume", "finish_job"]
    value: int | str
    sentence: str


class Preemption(BaseModel):
    """The last time that a job lost GPUs to others: when, by which rule, to whom, and the numbers behind it."""

    at: datetime
    from_gpus: int
    to_gpus: int
    policy: str
    by: list[JobRef] = Field(
        default_factory=list, description="Jobs that got GPUs by the same decision, as they are now."
    )
    reason: Reason | None = Field(None, description="Why the policy gave it no more at that moment.")
    decision: int | None = None
    sentence: str


class Why(BaseModel):
    """Why a job has what it has: the answer to `shoal why`."""

    job: JobRef
    reason: Reason | None
    sentence: str
    policy: str
    ahead: list[JobRef] = Field(
        default_factory=list, description="Jobs that hold GPUs or will get some first; at most 5."
    )
    ahead_total: int = 0
    starts_in: Estimate | None = Field(None, description="Null if it runs already or is over.")
    grows_in: Estimate | None = Field(
        None, description="When GPUs that it could use are shared out anew; only for a job that has some."
    )
    could: list[CouldDo] = Field(default_factory=list)
    last_decision: int | None = Field(None, description="Number of the plan that says so.")
    decided_at: datetime | None = None
    at: datetime | None = Field(None, description="The moment that was asked about; null for now.")
    preempted: Preemption | None = Field(None, description="Only if it was asked for, and ever happened.")


class Event(BaseModel):
    """Something that happened. Events are never changed: they are the audit log."""

    id: int = Field(description="Ascending; the cursor of `GET /events` and the id of server-sent events.")
    at: datetime
    type: str = Field(description="job.submitted, job.started, job.resized, ... (docs/api.md)")
    actor: str = Field(description="User name, or `system` for the scheduler and the executor.")
    job: int | None = None
    user: str | None = Field(None, description="Owner of the job.")
    plan: int | None = Field(None, description="The decision that caused it.")
    message: str
    data: dict[str, Any] = Field(default_factory=dict)


class EventList(Page[Event]):
    """Oldest first, from after `cursor`. `next` is never null: ask again later from there."""


class LogLine(BaseModel):
    at: datetime
    worker: str
    rank: int | None = None
    text: str
    cursor: str | None = Field(None, description="Resume after this line (only when following).")


class LogPage(Page[LogLine]):
    """Lines of all workers merged by time. `next` is where to go on when there is more."""


class Share(BaseModel):
    """One user's line in the fairness ledger; GPU-seconds since the ledger began."""

    user: str
    tickets: float
    gpus: int = Field(description="Held now.")
    entitled_gpus: float = Field(description="Due now by tickets, capped by what its jobs can use.")
    running_jobs: int
    pending_jobs: int
    entitled_gpu_s: float
    received_gpu_s: float
    lent_gpu_s: float
    borrowed_gpu_s: float
    traded_gpu_s: float


class ShareList(Page[Share]):
    """The fairness ledger."""

    since: datetime
    total_gpus: int


class SpeedPoint(BaseModel):
    gpus: int
    speed: float = Field(description="Steps per second.")
    measured: bool


class Profile(BaseModel):
    """What is known of a job's speed and of the work left."""

    job: JobRef
    basis: str = Field(description="Where the speeds come from: measured, earlier jobs, or an assumption.")
    points: list[SpeedPoint]
    remaining: Estimate


class NodeStatus(BaseModel):
    name: str
    gpu_type: str
    gpus: int
    used: int
    virtual: bool
    devices: list[str] = Field(default_factory=list, description="Of each GPU: name or id, for people.")
    state: Literal["ready", "drained"] = Field("ready", description="drained: no job is given its GPUs.")


class NodeList(Page[NodeStatus]):
    """The machines there are."""


class Node(NodeStatus):
    """One machine, and who is on it."""

    jobs: list[JobRef] = Field(default_factory=list, description="That hold GPUs of this node.")


class Status(BaseModel):
    """What is in force."""

    version: str
    api: str = "v1"
    home: str
    pid: int
    address: str
    started_at: datetime
    executor: str
    virtual: bool = Field(description="True: the GPUs are virtual, jobs run on the CPU.")
    policy: str
    policy_options: dict[str, Any] = Field(default_factory=dict)
    store: Literal["sqlite", "postgresql"] = "sqlite"
    nodes: list[NodeStatus]
    total_gpus: int
    used_gpus: int
    jobs: dict[str, int] = Field(description="Number of jobs you may see, by state.")
    user: str = Field(description="Who you are to the server.")
    role: str
    warnings: list[str] = Field(default_factory=list)
    last_event: int = 0


class Check(BaseModel):
    name: str
    status: Literal["ok", "warning", "error"]
    message: str
    hint: str | None = None


class Doctor(BaseModel):
    healthy: bool
    checks: list[Check]


class PolicyInfo(BaseModel):
    name: str
    summary: str
    elastic: bool
    needs_lengths: bool


class Policy(PolicyInfo):
    """The policy in force, and those that could be."""

    options: dict[str, Any] = Field(default_factory=dict)
    available: list[PolicyInfo] = Field(default_factory=list)


class PolicySet(Given):
    name: str = Field(max_length=100)
    options: dict[str, str] = Field(default_factory=dict, max_length=64)

    model_config = ConfigDict(extra="forbid", json_schema_extra={"example": {"name": "afs-p"}})


class PlanRequest(Given):
    """What would happen if this job were submitted now. Nothing is changed."""

    spec: JobSpec


class Change(BaseModel):
    """What the plan would do to another job."""

    job: JobRef
    from_gpus: int
    to_gpus: int


class PlanOutcome(BaseModel):
    verdict: Literal["starts", "waits", "shrinks_others", "infeasible"]
    gpus: int
    reason: Reason | None = None
    sentence: str
    changes: list[Change] = Field(default_factory=list)


class Shutdown(Given):
    jobs: Literal["stop", "keep"] = Field(
        "stop",
        description="stop: jobs give their GPUs back and go on after the next start; keep: they run on.",
    )


class Role(StrEnum):
    VIEWER = "viewer"  # sees everything, changes nothing
    USER = "user"  # sees and touches their own jobs
    ADMIN = "admin"  # sees and touches everything


class User(BaseModel):
    name: str
    role: Role
    tickets: float
    created_at: datetime


class UserList(Page[User]):
    pass


class UserCreate(Given):
    name: Name
    role: Role = Role.USER
    tickets: float = Field(1.0, gt=0, le=1e6)


class UserChange(Given):
    role: Role | None = None
    tickets: float | None = Field(None, gt=0, le=1e6)


class Token(BaseModel):
    id: int
    user: str
    label: str
    created_at: datetime
    last_used_at: datetime | None = None
    expires_at: datetime | None = None


class TokenList(Page[Token]):
    pass


class TokenCreate(Given):
    user: Name | None = Field(None, description="Yourself if left out; only admins make tokens for others.")
    label: str = Field("", max_length=100, pattern=r"^[^\x00-\x1f\x7f]*$")
    expires_in_s: float | None = Field(None, gt=0, le=10 * 365 * 86400)


class TokenCreated(Token):
    token: str = Field(description="Shown this once; only its hash is kept.")
