"""A job as a user submits it: a range of GPUs, its amount of work, and how it may be resized."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass

from shoal.core.errors import ShoalError


class Kind(enum.StrEnum):
    """How the processes of a job exchange gradients. This determines what a share consists of."""

    #: A share of n GPUs is n equal workers.
    ALL_REDUCE = "all-reduce"
    #: A share is a pair: workers (one GPU each) and parameter servers.
    PARAMETER_SERVER = "parameter-server"


@dataclass(frozen=True, slots=True)
class GpuRange:
    """`min..max` GPUs: a job runs with at least `min` GPUs or not at all, and never with more than `max`.

    With a `step`, only its multiples are possible: a model that is sharded over groups of 2 GPUs has 2, 4, 6, ...
    """

    min: int
    max: int
    step: int = 1

    def __post_init__(self) -> None:
        if self.min < 1:
            raise ShoalError(f"a job needs at least 1 GPU, not {self.min}")
        if self.max < self.min:
            raise ShoalError(f"min {self.min} is above max {self.max}")
        if self.step < 1:
            raise ShoalError(f"the step of a range must be at least 1, not {self.step}")
        if self.min % self.step or self.max % self.step:
            low = max(self.floor(self.min + self.step - 1), self.step)
            near = GpuRange(low, max(self.floor(self.max), low), self.step)
            raise ShoalError(f"{self.min}..{self.max} are no multiples of {self.step}: write {near}")

    @classmethod
    def parse(cls, text: str) -> GpuRange:
        """`4`, `1..8`, or `2..8:2` for multiples of 2 only."""
        match = re.fullmatch(r"\s*(\d+)\s*(?:\.\.\s*(\d+)\s*)?(?::\s*(\d+)\s*)?", text)
        if not match:
            raise ShoalError(
                f"{text!r} is not a number of GPUs: write 4, 1..8 for a range, or 2..8:2 for multiples of 2 in it"
            )
        low = int(match[1])
        return cls(low, int(match[2]) if match[2] else low, int(match[3]) if match[3] else 1)

    @classmethod
    def step_of(cls, text: str) -> int:
        """The step of a range as its owner wrote it; 1 if the size was left open (`auto`)."""
        step = text.partition(":")[2]
        return int(step) if step else 1

    def floor(self, gpus: int) -> int:
        """The largest multiple of the step that is not above."""
        return gpus - gpus % self.step

    def __str__(self) -> str:
        if self.min == self.max:
            return str(self.min)
        return f"{self.min}..{self.max}" + (f":{self.step}" if self.step > 1 else "")


class When(enum.StrEnum):
    """Which end of another job lets a dependent job run."""

    SUCCESS = "success"
    FAILURE = "failure"
    ANY = "any"

    def allows(self, succeeded: bool) -> bool:
        """Whether a job that ended like this lets the dependent job run."""
        return self is When.ANY or succeeded == (self is When.SUCCESS)


@dataclass(frozen=True, slots=True)
class After:
    """The job waits for the end of another job."""

    job_id: int
    when: When = When.SUCCESS


@dataclass(frozen=True, slots=True)
class Throttle:
    """At most `max_running_jobs` of the jobs with this key run at once: the `%8` of an array."""

    key: str
    max_running_jobs: int


@dataclass(frozen=True, slots=True)
class Job:
    """A job as submitted. State that changes while it runs is in the view."""

    name: str
    submit_s: float
    gpus: GpuRange
    #: The size that the owner requests. Policies that do not resize use it.
    requested_gpus: int
    user: str = "default"
    model: str = ""
    #: Total work; None if unknown.
    iterations: float | None = None
    kind: Kind = Kind.ALL_REDUCE
    #: GPU types the job may use; empty means any.
    gpu_types: tuple[str, ...] = ()
    weight: float = 1.0
    #: Fraction of a GPU that each worker needs. Below 1 the GPU may be shared with another job.
    gpu_fraction: float = 1.0
    #: How the autoscaler searches for its size (parsed by `knowledge.size_search`); empty: not at all.
    autoscale: str = ""
    #: Among the owner's own jobs, one with a higher priority starts and grows first.
    priority: int = 0
    #: It does not run before this time.
    not_before_s: float = 0.0
    #: It does not run before these jobs have ended.
    after: tuple[After, ...] = ()
    #: It is ended after so many seconds with GPUs; None: no limit.
    time_limit_s: float | None = None
    #: Its owner needs it by this time; None: no deadline. Only explanations and reports use it.
    deadline_s: float | None = None
    throttle: Throttle | None = None

    def __post_init__(self) -> None:
        if not self.gpus.min <= self.requested_gpus <= self.gpus.max:
            raise ShoalError(f"job {self.name!r}: requested {self.requested_gpus} is not within {self.gpus}")
        if self.requested_gpus % self.gpus.step:
            raise ShoalError(
                f"job {self.name!r}: requested {self.requested_gpus} is no multiple of its step {self.gpus.step}"
            )
        if self.gpus.step > 1 and self.kind is Kind.PARAMETER_SERVER:
            raise ShoalError(f"job {self.name!r}: a step in the range is for all-reduce jobs only")
        if self.iterations is not None and not self.iterations > 0:
            raise ShoalError(f"job {self.name!r}: iterations must be above 0, not {self.iterations}")
        if not 0 < self.gpu_fraction <= 1:
            raise ShoalError(f"job {self.name!r}: gpu_fraction must be in (0, 1], not {self.gpu_fraction}")
        if not self.weight > 0:
            raise ShoalError(f"job {self.name!r}: weight must be above 0, not {self.weight}")
        if self.time_limit_s is not None and not self.time_limit_s > 0:
            raise ShoalError(f"job {self.name!r}: time_limit_s must be above 0, not {self.time_limit_s}")

    @property
    def has_conditions(self) -> bool:
        """Whether something besides GPUs decides when it may run."""
        return bool(self.not_before_s or self.after or self.throttle)
