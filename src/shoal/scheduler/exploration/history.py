"""What was measured in trials, how often, and when it may be measured again."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from shoal.scheduler.exploration.trial import AtSize, OnType, Subject, subject_from_plain

#: After the n-th trial of the same thing, it is not tried again for AGAIN_S * AGAIN_FACTOR**(n - 1).
AGAIN_S = 120.0
AGAIN_FACTOR = 4.0


@dataclass(slots=True)
class Tried:
    times: int = 0
    not_before_s: float = 0.0
    #: Whether a worker failed in the last trial of this.
    failed: bool = False


@dataclass(slots=True)
class History:
    tried: dict[Subject, Tried] = field(default_factory=dict)

    def may_try(self, subject: Subject, now_s: float) -> bool:
        """Whether it was not tried just before. Other GPU types are tried once per model and user."""
        before = self.tried.get(subject)
        if before is None:
            return True
        return not isinstance(subject, OnType) and now_s >= before.not_before_s

    def add(self, subject: Subject, now_s: float, *, failed: bool) -> None:
        """A trial of this has ended."""
        tried = self.tried.setdefault(subject, Tried())
        tried.times += 1
        tried.failed = failed
        tried.not_before_s = now_s + AGAIN_S * AGAIN_FACTOR ** min(tried.times - 1, 8)

    def rests(self, now_s: float) -> bool:
        """Whether anything may be tried again later."""
        return any(tried.not_before_s > now_s for tried in self.tried.values())

    def failed_sizes(self, model: str, gpu_type: str) -> list[int]:
        """Sizes at which a worker failed when a job of the model was measured there last."""
        return sorted(
            subject.gpus
            for subject, tried in self.tried.items()
            if tried.failed
            and isinstance(subject, AtSize)
            and (subject.model, subject.gpu_type) == (model, gpu_type)
        )

    def state(self) -> list[dict[str, Any]]:
        return [{"subject": asdict(subject), **asdict(tried)} for subject, tried in self.tried.items()]

    def restore(self, saved: Iterable[dict[str, Any]], shift_s: float) -> None:
        self.tried = {
            subject_from_plain(one["subject"]): Tried(
                one["times"], one["not_before_s"] + shift_s, one["failed"]
            )
            for one in saved
        }
