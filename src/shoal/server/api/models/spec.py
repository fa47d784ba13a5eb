"""A job as its owner submits it."""

from __future__ import annotations

import re
from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, field_validator, model_validator

from shoal.core.errors import ShoalError
from shoal.core.job import GpuRange, When
from shoal.server.api.models.common import Given, Name
from shoal.server.api.models.examples import shown
from shoal.server.api.models.tasks import MAX_SWEEP_KEYS, SweepValue, check_tasks

ENV_NAME = r"^[A-Za-z_][A-Za-z0-9_]{0,127}$"
MAX_COMMAND_BYTES = 64 * 1024
#: In place of a number of GPUs: the server chooses from what it knows of similar jobs.
AUTO = "auto"

EnvName = Annotated[str, StringConstraints(pattern=ENV_NAME)]
#: Values of environment variables; they cannot contain NUL.
EnvValue = Annotated[str, StringConstraints(max_length=32 * 1024, pattern=r"^[^\x00]*$")]


#: Variables that the executor sets, so a job cannot. The runtime's own settings are the exception.
_RESERVED = frozenset(
    [
        "CUDA_VISIBLE_DEVICES",
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
    ]
)
_RESERVED_PREFIXES = ("SHOAL_", "PET_")
_SETTINGS = frozenset({"SHOAL_CHECKED", "SHOAL_STATE_BYTES_PER_S"})


def is_reserved(variable: str) -> bool:
    """Whether only the executor may set this variable of a job."""
    if variable in _SETTINGS:
        return False
    return variable in _RESERVED or variable.startswith(_RESERVED_PREFIXES)


class JobState(StrEnum):
    """The state of a job. `shoal.server.loop.lifecycle` has the transitions."""

    PENDING = "pending"  # waits for GPUs, also after a preemption; `reason` says why
    STARTING = "starting"  # has GPUs; its workers are starting
    RUNNING = "running"  # trains
    PAUSED = "paused"  # held by its owner; has no GPUs
    STOPPING = "stopping"  # being cancelled; its workers are ending
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_final(self) -> bool:
        return self in (JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED)


class Resize(StrEnum):
    """How a job may change size."""

    LIVE = "live"  # uses shoal.torch: resized while it trains
    RESTART = "restart"  # stopped and restarted at another size, from its own checkpoint
    NEVER = "never"  # fixed size; can only be paused


class Needs(Given, json_schema_extra=shown({"gpu_mem_mb": 6000, "gpu_util": 40})):
    """What a job of one GPU needs of it. Used only where GPUs are shared or jobs are pre-scheduled."""

    gpu_mem_mb: float | None = Field(None, gt=0, le=1e8, description="Peak GPU memory.")
    gpu_util: float | None = Field(None, ge=0, le=100, description="Average utilisation in per cent.")
    pre_s: float | None = Field(
        None, ge=0, le=1e6, description="Seconds from its start to its first use of the GPU."
    )
    post_s: float | None = Field(
        None, ge=0, le=1e6, description="Seconds from its last use of the GPU to its end."
    )


class JobNeeds(BaseModel):
    """Known needs of a job, and their source."""

    gpu_mem_mb: float | None = None
    gpu_util: float | None = None
    pre_s: float | None = None
    post_s: float | None = None
    total_s: float | None = None
    basis: str = ""


LabelValue = Annotated[str, StringConstraints(max_length=100, pattern=r"^[^\x00-\x1f\x7f]*$")]
#: Signals that a worker may be sent before its job reaches its time limit.
Warning_ = Literal["USR1", "USR2", "HUP", "INT", "TERM"]


class AfterJob(Given, json_schema_extra=shown({"job": "prepare", "on": "success"})):
    """Another job, or all tasks of an array, that must have ended first."""

    job: Annotated[str, StringConstraints(min_length=1, max_length=100)] = Field(
        description="Number or name of an earlier job, or the name of an array."
    )
    on: When = Field(When.SUCCESS, description="Which end lets this job run.")


class JobSpec(Given):
    """What a user submits."""

    name: Name | None = Field(
        None, description="Unique among your unfinished jobs; made from the command if left out."
    )
    command: list[Annotated[str, StringConstraints(pattern=r"^[^\x00]*$")]] = Field(
        min_length=1, max_length=1024, description="Program and arguments; no shell."
    )
    workdir: str = Field("/", max_length=4096, description="Absolute path; the command starts there.")
    upload: bool = Field(
        False, description="Machines get a copy of workdir from the server instead of sharing it."
    )
    tree: str | None = Field(
        None,
        pattern=r"^[0-9a-f]{64}$",
        description="With upload: the digest under which workdir was uploaded. The client sets it.",
    )
    gpus: str = Field(
        "1",
        max_length=32,
        description="`4`, a range `1..8`, or `auto`: chosen from what is known of similar jobs.",
    )
    requested_gpus: int | None = Field(
        None, ge=1, le=1_000_000, description="GPUs under policies that do not resize; the max if left out."
    )
    resize: Resize | None = Field(None, description="Default: `live` if gpus is a range, else `never`.")
    per_gpu: bool = Field(
        False,
        description="Start the command once per GPU, with RANK, WORLD_SIZE and LOCAL_RANK, in place of once per "
        "machine. Live jobs always have one process per GPU.",
    )
    interactive: bool = Field(
        False,
        description="The command runs in a terminal (`shoal run --interactive`): the job holds its GPUs for sessions "
        "and ends with the last one.",
    )
    gpu_types: list[Name] = Field(default_factory=list, max_length=32, description="Empty: any type.")
    env: dict[EnvName, EnvValue] = Field(default_factory=dict, max_length=512)
    secrets: dict[EnvName, EnvValue] = Field(
        default_factory=dict, max_length=64, description="Environment variables whose values are never shown."
    )
    weight: float = Field(1.0, gt=0, le=1e6, description="Weight among your own jobs.")
    model: str | None = Field(
        None, max_length=200, description="Jobs with the same word share measurements of their speed."
    )
    iterations: float | None = Field(None, gt=0, le=1e15, description="Total steps, if you know them.")
    expected_s: float | None = Field(
        None, gt=0, le=1e9, description="Duration at `requested_gpus`, if you know it."
    )
    target_loss: float | None = Field(
        None,
        description="The job ends, after a checkpoint, when the median of the last five reported losses reaches "
        "this, or with its last step if that is sooner. It needs a job that is resized live.",
    )
    max_restarts: int = Field(0, ge=0, le=1000, description="Restarts after it failed or lost all workers.")
    autoscale: str | None = Field(
        None,
        max_length=500,
        description="Search for its size while it trains, `efficiency:threshold=0.5`: from the minimum up, "
        "as long as this heuristic accepts more GPUs.",
    )
    replace_stragglers: bool = Field(
        False, description="Move a worker that is much slower than the others to another GPU, if one is free."
    )
    needs: Needs | None = Field(None, description="Its needs of one GPU, if you know them.")
    grace_s: float = Field(
        10.0, ge=0, le=3600, description="Time between asking its workers to end and killing them."
    )
    priority: int = Field(
        0, ge=-1000, le=1000, description="Order among your own jobs: a higher one starts and grows first."
    )
    labels: dict[Name, LabelValue] = Field(
        default_factory=dict, max_length=64, description="Words to find the job by: `shoal ps -l key=value`."
    )
    not_before: datetime | None = Field(None, description="It does not start before this time.")
    deadline: datetime | None = Field(
        None, description="When you need it; `shoal why` says whether that will be met."
    )
    time_limit_s: float | None = Field(
        None, gt=0, le=1e9, description="It is ended after this long with GPUs, and has failed then."
    )
    warn_signal: Warning_ | None = Field(
        None,
        description="Sent to its workers `warn_s` before the time limit, and to a command that can neither move nor "
        "save before its machine is taken away; live jobs save a checkpoint anyway.",
    )
    warn_s: float = Field(60.0, ge=0, le=86400, description="How long before that it is warned.")
    after: list[AfterJob] = Field(
        default_factory=list, max_length=1000, description="It does not start before these jobs have ended."
    )
    array: str | None = Field(
        None, max_length=100, description="Submit many jobs: `0-99`, or `0-99%8` to run 8 of them at once."
    )
    sweep: dict[Name, list[SweepValue]] | None = Field(
        None, max_length=MAX_SWEEP_KEYS,
        description="Submit a job for every combination of these values, in place of `{name}` in the command.",
    )  # fmt: skip
    max_running: int | None = Field(
        None, ge=1, le=1_000_000, description="Tasks of an array or sweep that run at once."
    )

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

    @field_validator("not_before", "deadline")
    @classmethod
    def _of_a_zone(cls, at: datetime | None) -> datetime | None:
        if at is not None and at.tzinfo is None:
            raise ValueError("the time has no time zone; write it in UTC, such as 2026-01-31T08:00:00Z")
        return at

    @field_validator("after", mode="before")
    @classmethod
    def _short_after(cls, after: Any) -> Any:
        """`prepare` and 17 are short for the success of that job."""
        given = after if isinstance(after, list) else [after]
        return [{"job": str(one)} if isinstance(one, (str, int)) else one for one in given]

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
        if self.autoscale and (self.resize not in (None, Resize.LIVE) or self.gpus.isdecimal()):
            raise ValueError("autoscale: needs a range of GPUs such as 1..8, and resize `live`")
        if self.target_loss is not None and not self._may_be_live:
            raise ValueError(
                "target_loss: only a job that is resized live ends at its target; give a range of GPUs such as 1..8, "
                "or resize `live`, and use shoal.torch"
            )
        if self.interactive and self.resize not in (None, Resize.NEVER):
            raise ValueError("interactive: a terminal cannot be moved; leave resize out")
        if self.tree is not None and not self.upload:
            raise ValueError("tree: is the name of an uploaded directory; set upload too")
        if self.name is not None and any(a.job == self.name for a in self.after):
            raise ValueError(f"after: {self.name} would wait for itself; name an earlier job")
        check_tasks(self.array, self.sweep, self.max_running)
        for field, given in (("env", self.env), ("secrets", self.secrets)):
            taken = sorted(name for name in given if is_reserved(name))
            if taken:
                raise ValueError(f"{field}: {taken[0]} is set by Shoal and cannot be changed; leave it out")
        twice = self.env.keys() & self.secrets.keys()
        if twice:
            raise ValueError(f"secrets: {sorted(twice)[0]} is given both in env and in secrets")
        return self

    def _check_range(self) -> None:
        try:
            gpus = GpuRange.parse(self.gpus)
        except ShoalError as error:
            other = ", or auto" if "is not a number" in str(error) else ""
            raise ValueError(f"gpus: {error}{other}") from None
        if gpus.max > 1_000_000:
            raise ValueError(f"gpus: {gpus.max} GPUs are more than any cluster has; the limit is 1000000")
        if self.requested_gpus is not None and not gpus.min <= self.requested_gpus <= gpus.max:
            raise ValueError(f"requested_gpus: {self.requested_gpus} is not within gpus {gpus}")
        if self.requested_gpus is not None and self.requested_gpus % gpus.step:
            raise ValueError(f"requested_gpus: {self.requested_gpus} is no multiple of {gpus.step}")
        if self.resize is Resize.NEVER and gpus.min != gpus.max:
            raise ValueError("gpus: a range needs resize `live` or `restart`; give one number, or say which")

    @property
    def range(self) -> GpuRange:
        return GpuRange.parse(self.gpus)

    @property
    def _may_be_live(self) -> bool:
        """Whether it is resized live, or `gpus auto` may make it so."""
        auto = self.gpus == AUTO and self.resize is None
        return (
            self.resize is Resize.LIVE or auto or (self.gpus != AUTO and self.effective_resize is Resize.LIVE)
        )

    @property
    def effective_resize(self) -> Resize:
        gpus = self.range
        return self.resize or (Resize.LIVE if gpus.max > gpus.min else Resize.NEVER)


class Scale(Given, json_schema_extra=shown({"min": 1, "max": 4})):
    """A new range for a job. Bounds that are left out stay."""

    min: int | None = Field(None, ge=1, le=1_000_000)
    max: int | None = Field(None, ge=1, le=1_000_000)
    pin: int | None = Field(None, ge=1, le=1_000_000, description="min and max at once.")

    @model_validator(mode="after")
    def _something(self) -> Scale:
        if self.pin is not None and (self.min is not None or self.max is not None):
            raise ValueError("give either pin, or min and max")
        if self.pin is None and self.min is None and self.max is None:
            raise ValueError("give min, max or pin")
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError(f"min {self.min} is above max {self.max}")
        return self


class Cancel(Given, json_schema_extra=shown({"grace_s": 5})):
    grace_s: float | None = Field(None, ge=0, le=3600, description="Instead of the job's own.")
