"""Cost models of a reconfiguration in the simulator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from shoal.core.errors import ShoalError, did_you_mean

#: Seconds to import the graph and run the first iteration, by model: the restart components measured by
#: the AFS authors in 2019 (their simulator's first versions), used where a model's own cost is not given.
MEASURED_RESTART_S: Mapping[str, float] = {
    "vgg16": 3.92,
    "googlenet": 4.08,
    "inception4": 10.37,
    "resnet50": 5.01,
    "dcgan": 3.18,
    "chatbot": 0.2,
    "video": 24.29,
    "facenet": 24.68,
}

KINDS = ("none", "restart", "concurrent", "suspend")


@dataclass(frozen=True)
class Costs:
    """How long a change of share stops training.

    none: not at all.
    restart: the job stops and restarts at the new size. This takes the measured time of its model, else `restart_s`.
    concurrent: new workers prepare for `prepare_s` while the old ones train, then all pause for `pause_s`. A newer
    target replaces a pending one at once.
    suspend: Gandiva's model. A job that resumes where it was suspended loses `resume_s`; one that resumes elsewhere
    or at another size loses `migrate_s` (OSDI'18: suspend and resume take less than 0.1 s for image models and up to
    1 s for large ones; migration to a warmed-up node less than 1 s for most models and 3.5 s for the largest).

    The first start is free in all models: the durations of the traces include it.
    """

    kind: Literal["none", "restart", "concurrent", "suspend"] = "none"
    restart_s: float = 30.0
    restart_by_model: Mapping[str, float] = field(default_factory=lambda: MEASURED_RESTART_S)
    prepare_s: float = 5.0
    pause_s: float = 0.1
    resume_s: float = 0.5
    migrate_s: float = 3.5

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ShoalError(f"there is no cost model {self.kind!r}; {did_you_mean(self.kind, KINDS)}")
        for name in ("restart_s", "prepare_s", "pause_s", "resume_s", "migrate_s"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ShoalError(f"{name} must be 0 or more seconds, not {getattr(self, name)}")
        for model, seconds in self.restart_by_model.items():
            if not 0 <= seconds < float("inf"):
                raise ShoalError(f"restart_s of {model} must be 0 or more seconds, not {seconds}")

    @property
    def move_s(self) -> float:
        """Seconds without progress when a job moves to other GPUs at the same size."""
        return {
            "none": 0.0,
            "restart": self.restart_s,
            "concurrent": self.pause_s,
            "suspend": self.migrate_s,
        }[self.kind]

    def restart_of(self, model: str) -> float:
        return self.restart_by_model.get(model, self.restart_s)
