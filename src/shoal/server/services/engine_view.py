"""What people see of the engine that provides machines, and what it adds to the reason why a job lacks GPUs."""

from __future__ import annotations

from typing import Protocol

from shoal.server.api import models as m
from shoal.server.loop.live_job import LiveJob


class EngineView(Protocol):
    def of_node(self, name: str) -> str | None:
        """How the engine sees a node: `job 4711 is up on g1`. None: it is no machine of the engine."""

    def coming(self) -> str | None:
        """What to tell somebody whose job waits for machines."""

    def most_gpus(self, gpu_type: str | None) -> int:
        """The most GPUs of a type (None: of any one type) that all its machines together could have."""

    def checks(self) -> list[m.Check]:
        """For `doctor`."""


class NoEngine:
    """Implements `EngineView` for a server without an engine."""

    def of_node(self, name: str) -> str | None:
        return None

    def coming(self) -> str | None:
        return None

    def most_gpus(self, gpu_type: str | None) -> int:
        return 0

    def checks(self) -> list[m.Check]:
        return []


#: What a server without an engine tells a person to do.
HOW_TO_JOIN = ": `shoal node add HOST` tells how"
#: Reasons that more machines could remove.
ABOUT_CAPACITY = frozenset(
    {
        "Infeasible",
        "NoMatchingGpu",
        "BehindOthers",
        "Fragmented",
        "WaitingForCapacity",
        "NotWorthIt",
        "PendingEvaluation",
    }
)


def with_engine(reason: m.Reason, job: LiveJob, engine: EngineView) -> m.Reason:
    """The reason, with what the engine does about it."""
    if reason.code not in ABOUT_CAPACITY or (job.target_gpus and job.target_gpus >= job.max_gpus):
        return reason
    coming = engine.coming()
    if coming is None:
        return reason
    code, sentence = reason.code, reason.sentence.removesuffix(HOW_TO_JOIN)
    if code == "Infeasible" and job.min_gpus <= engine.most_gpus(job.gpu_type):
        code = "WaitingForCapacity"  # it fits into what the engine could provide
    return m.Reason(code=code, sentence=f"{sentence}; {coming}", evidence=reason.evidence)
