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
    """`min..max` GPUs: a job runs with at least `min` GPUs or not at all, and never with more than `max`."""

    min: int
    max: int

    def __post_init__(self) -> None:
        if self.min < 1:
            raise ShoalError(f"a job needs at least 1 GPU, not {self.min}")
        if self.max < self.min:
            raise ShoalError(f"min {self.min} is above max {self.max}")

    @classmethod
    def parse(cls, text: str) -> GpuRange:
        """`4` or `1..8`."""
        match = re.fullmatch(r"\s*(\d+)\s*(?:\.\.\s*(\d+)\s*)?", text)
        if not match:
            raise ShoalError(f"{text!r} is not a number of GPUs: write 4, or 1..8 for a range")
        low = int(match[1])
        return cls(low, int(match[2]) if match[2] else low)

    def __str__(self) -> str:
        return str(self.min) if self.min == self.max else f"{self.min}..{self.max}"


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

    def __post_init__(self) -> None:
        if not self.gpus.min <= self.requested_gpus <= self.gpus.max:
            raise ShoalError(f"job {self.name!r}: requested {self.requested_gpus} is not within {self.gpus}")
        if self.iterations is not None and not self.iterations > 0:
            raise ShoalError(f"job {self.name!r}: iterations must be above 0, not {self.iterations}")
        if not 0 < self.gpu_fraction <= 1:
            raise ShoalError(f"job {self.name!r}: gpu_fraction must be in (0, 1], not {self.gpu_fraction}")
        if not self.weight > 0:
            raise ShoalError(f"job {self.name!r}: weight must be above 0, not {self.weight}")
