"""A trial: jobs run at other sizes for a number of steps, so that their speed there is measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class AtSize:
    """What a trial measures: the speed of a model with so many GPUs of a type."""

    model: str
    gpu_type: str
    gpus: int


@dataclass(frozen=True, slots=True)
class OnType:
    """What a trial measures: the speed of a model on a GPU type that no job of this user and model has run on."""

    model: str
    gpu_type: str
    user: str


Subject = AtSize | OnType


def subject_from_plain(saved: Mapping[str, Any]) -> Subject:
    return OnType(**saved) if "user" in saved else AtSize(**saved)


@dataclass(frozen=True, slots=True)
class Member:
    """A job that takes part in a trial: it is measured, or it gives or takes the GPUs for it."""

    job_id: int
    gpus: int
    gpu_type: int
    before_gpus: int
    before_type: int
    #: The trial lasts until the job was measured so often at this size; 0: it was measured there before.
    samples: int
    subject: Subject | None

    @property
    def is_measured(self) -> bool:
        return self.samples > 0


@dataclass(frozen=True, slots=True)
class Trial:
    members: tuple[Member, ...]
    steps: int
    began_s: float
    #: When it ends even if nothing was measured.
    until_s: float
    #: The job of which a worker failed during the trial.
    failed_job: int | None = None

    @property
    def moved_gpus(self) -> int:
        """GPUs that are not where the policy would have them."""
        grown = sum(max(m.gpus - m.before_gpus, 0) for m in self.members)
        shrunk = sum(max(m.before_gpus - m.gpus, 0) for m in self.members)
        moved = sum(m.gpus for m in self.members if m.gpu_type != m.before_type)
        return max(grown, shrunk, moved)

    @property
    def subjects(self) -> list[Subject]:
        return [m.subject for m in self.members if m.subject is not None]

    def member(self, job_id: int) -> Member | None:
        return next((m for m in self.members if m.job_id == job_id), None)

    def with_types(self, before: Sequence[str], now: Sequence[str]) -> Trial | None:
        """The trial in a cluster with other GPU types; None if a type of it is gone."""
        members = []
        for m in self.members:
            names = before[m.gpu_type], before[m.before_type]
            if not set(names) <= set(now):
                return None
            gpu_type, before_type = (now.index(name) for name in names)
            members.append(replace(m, gpu_type=gpu_type, before_type=before_type))
        return replace(self, members=tuple(members))

    def plain(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_plain(cls, saved: Mapping[str, Any], shift_s: float = 0.0) -> Trial:
        members = []
        for member in saved["members"]:
            subject = member["subject"]
            members.append(
                Member(**member | {"subject": None if subject is None else subject_from_plain(subject)})
            )
        times = {"began_s": saved["began_s"] + shift_s, "until_s": saved["until_s"] + shift_s}
        return cls(**dict(saved) | times | {"members": tuple(members)})
