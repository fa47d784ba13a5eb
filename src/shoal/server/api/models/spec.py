"""A job as its owner submits it."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, field_validator, model_validator

from shoal.core.errors import ShoalError
from shoal.core.job import GpuRange
from shoal.server.api.models.common import Given, Name
from shoal.server.api.models.examples import shown

ENV_NAME = r"^[A-Za-z_][A-Za-z0-9_]{0,127}$"
MAX_COMMAND_BYTES = 64 * 1024
#: In place of a number of GPUs: the server chooses from what it knows of similar jobs.
AUTO = "auto"

EnvName = Annotated[str, StringConstraints(pattern=ENV_NAME)]
#: Values of environment variables; they cannot contain NUL.
EnvValue = Annotated[str, StringConstraints(max_length=32 * 1024, pattern=r"^[^\x00]*$")]


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
        "1",
        max_length=32,
        description="`4`, a range `1..8`, or `auto`: chosen from what is known of similar jobs.",
    )
    requested_gpus: int | None = Field(
        None, ge=1, le=1_000_000, description="GPUs under policies that do not resize; the max if left out."
    )
    resize: Resize | None = Field(None, description="Default: `live` if gpus is a range, else `never`.")
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
        description="The job is done when its logged loss reaches this; used to estimate the remaining work.",
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
        if self.autoscale and (self.resize not in (None, Resize.LIVE) or self.gpus.isdecimal()):
            raise ValueError("autoscale: needs a range of GPUs such as 1..8, and resize `live`")
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
        return self


class Cancel(Given, json_schema_extra=shown({"grace_s": 5})):
    grace_s: float | None = Field(None, ge=0, le=3600, description="Instead of the job's own.")
