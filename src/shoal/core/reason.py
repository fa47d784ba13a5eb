"""Why a job has fewer GPUs than it could use: a code, the numbers behind it, and a sentence."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field


class Code(enum.IntEnum):
    """In order of precedence: if several apply, the first is the reason."""

    NONE = 0  #: the job has all GPUs it could use; not a reason
    HELD = 1
    MISCONFIGURED = 2
    INFEASIBLE = 3
    EXCEEDS_LIMIT = 4
    NO_MATCHING_GPU = 5
    NOT_BEFORE = 6
    QUOTA_EXHAUSTED = 7
    BEHIND_OTHERS = 8
    FRAGMENTED = 9
    WAITING_FOR_RELEASE = 10
    WAITING_FOR_CAPACITY = 11
    COOL_DOWN = 12
    NOT_WORTH_IT = 13
    PENDING_EVALUATION = 14
    STRAGGLER = 15  #: why a worker is replaced

    @property
    def label(self) -> str:
        """The name in messages and in JSON: `WaitingForCapacity`."""
        return "".join(part.capitalize() for part in self.name.split("_"))


@dataclass(frozen=True, slots=True)
class Reason:
    """A reason always has a sentence, and only a job below its wish has one."""

    code: Code
    sentence: str
    evidence: Mapping[str, float | int | str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.code is Code.NONE:
            raise ValueError("a reason needs a code")
        if not self.sentence:
            raise ValueError("a reason needs a sentence")

    def __str__(self) -> str:
        return f"{self.code.label}: {self.sentence}"
