"""A trial: jobs run at other sizes for a number of steps, so that their speed there is measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

#: What is measured: (model, GPU type, GPUs), or (model, GPU type, user) for the first trial on another type.
Key = tuple[str, str, int | str]


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
    key: Key | None

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

    @property
    def moved_gpus(self) -> int:
        """GPUs that are not where the policy would have them."""
        grown = sum(max(m.gpus - m.before_gpus, 0) for m in self.members)
        shrunk = sum(max(m.before_gpus - m.gpus, 0) for m in self.members)
        moved = sum(m.gpus for m in self.members if m.gpu_type != m.before_type)
        return max(grown, shrunk, moved)

    @property
    def keys(self) -> list[Key]:
        return [m.key for m in self.members if m.key is not None]

    def member(self, job_id: int) -> Member | None:
        return next((m for m in self.members if m.job_id == job_id), None)

    def plain(self) -> dict[str, Any]:
        members = [
            [
                m.job_id, m.gpus, m.gpu_type, m.before_gpus, m.before_type, m.samples,
                None if m.key is None else list(m.key),
            ]
            for m in self.members
        ]  # fmt: skip
        return {
            "members": members,
            "steps": self.steps,
            "began_s": self.began_s,
            "until_s": self.until_s,
        }

    @classmethod
    def from_plain(cls, saved: dict[str, Any], shift_s: float = 0.0) -> Trial:
        members = tuple(
            Member(job, gpus, t, before, before_t, samples, None if key is None else (key[0], key[1], key[2]))
            for job, gpus, t, before, before_t, samples, key in saved["members"]
        )
        began_s, until_s = saved["began_s"] + shift_s, saved["until_s"] + shift_s
        return cls(members, saved["steps"], began_s, until_s)
