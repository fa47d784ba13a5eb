"""What a user submits: a range of GPUs, how the job may change size, and what is known of it."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass

from shoal.core.errors import ShoalError


class Kind(enum.StrEnum):
    """How a job's processes exchange gradients, which decides what a share is."""

    #: A share of n GPUs is n equal workers.
    ALL_REDUCE = "all-reduce"
    #: A share is a pair: workers (one GPU each) and parameter servers.
    PARAMETER_SERVER = "parameter-server"


@dataclass(frozen=True, slots=True)
class GpuRange:
    """`min..max` GPUs: a job runs with at least `min` or not at all, and never with more than `max`."""

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
    """A job as submitted; what changes while it runs is in the view, not here."""

    name: str
    submit_s: float
    gpus: GpuRange
    #: The size the owner asked for: what policies that do not resize give it.
    requested_gpus: int
    user: str = "default"
    model: str = ""
    #: Total work; None when the owner does not know.
    iterations: float | None = None
    kind: Kind = Kind.ALL_REDUCE
    #: GPU types the job may use; empty means any.
    gpu_types: tuple[str, ...] = ()
    weight: float = 1.0
    #: Part of a GPU each worker needs; below 1 the GPU may be shared with another job.
    gpu_fraction: float = 1.0
    #: How its size is searched while it runs (`knowledge.size_search` reads it); empty: not at all.
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
