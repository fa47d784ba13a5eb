"""Why a job has fewer GPUs than it could use: a code, the numbers behind it, and a sentence."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field


class Code(enum.IntEnum):
    """In order of precedence: if several apply, the first is the reason."""

    NONE = 0  #: the job has all GPUs it could use; not a reason
    HELD = 1
    INFEASIBLE = 3
    EXCEEDS_LIMIT = 4  #: a limit of its user or group is below its minimum, or below what it could use
    NO_MATCHING_GPU = 5
    NOT_BEFORE = 6
    DEPENDENCY = 7  #: it waits for the end of another job
    QUOTA_EXHAUSTED = 8  #: other jobs use up a limit of its user or group
    BEHIND_OTHERS = 9
    FRAGMENTED = 10
    WAITING_FOR_RELEASE = 11
    WAITING_FOR_CAPACITY = 12
    COOL_DOWN = 13
    NOT_WORTH_IT = 14
    PENDING_EVALUATION = 15
    STRAGGLER = 16  #: why a worker is replaced
    MEASURING = 17  #: it has another size for some steps, so that its speed there is known

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
