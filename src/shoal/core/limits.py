"""Limits of a user or of a group of users."""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import isfinite

from shoal.core.errors import ShoalError

WEEK_S = 7 * 24 * 3600.0
#: Weeks begin on Mondays at 00:00 UTC. 1970 began on a Thursday.
MONDAY_S = 4 * 24 * 3600.0


@dataclass(frozen=True, slots=True)
class Limits:
    """What a user, or a group of users, may have at most. None and empty: no limit."""

    #: GPUs at once.
    max_gpus: int | None = None
    #: GPUs of a type at once: (type, GPUs).
    max_gpus_of_type: tuple[tuple[str, int], ...] = ()
    #: Jobs with GPUs at once.
    max_running_jobs: int | None = None
    #: Unfinished jobs without GPUs. A submission beyond that is refused.
    max_waiting_jobs: int | None = None
    #: GPU hours from Monday 00:00 UTC to the next.
    gpu_hours_per_week: float | None = None

    def __post_init__(self) -> None:
        for name in ("max_gpus", "max_running_jobs", "gpu_hours_per_week"):
            value = getattr(self, name)
            if value is not None and not (value >= 0 and isfinite(value)):
                raise ShoalError(f"{name} must be 0 or more, not {value}")
        if self.max_waiting_jobs is not None and self.max_waiting_jobs < 1:
            raise ShoalError(f"max_waiting_jobs must be 1 or more, not {self.max_waiting_jobs}")
        for gpu_type, gpus in self.max_gpus_of_type:
            if gpus < 0:
                raise ShoalError(f"max_gpus_of_type: {gpu_type} must be 0 or more, not {gpus}")

    def __bool__(self) -> bool:
        return self != NO_LIMITS

    @property
    def of_type(self) -> dict[str, int]:
        return dict(self.max_gpus_of_type)

    def plain(self) -> dict[str, object]:
        """The limits that are set, as plain data; `from_plain` is the inverse."""
        found = {f.name: getattr(self, f.name) for f in fields(self)}
        found["max_gpus_of_type"] = self.of_type
        return {name: value for name, value in found.items() if value not in (None, {})}

    @classmethod
    def from_plain(cls, values: dict[str, object]) -> Limits:
        """Limits from plain data with the same names."""
        known = dict(values)
        by_type = known.pop("max_gpus_of_type", None) or {}
        assert isinstance(by_type, dict)
        return cls(max_gpus_of_type=tuple(sorted(by_type.items())), **known)  # type: ignore[arg-type]


NO_LIMITS = Limits()
