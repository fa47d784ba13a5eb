"""The whole difference of a cycle: from the shares before its events to the shares after its decision.

Some events take GPUs from a job before the policy decides: its owner holds it, or its node is lost. `Before` notes
what such a job had, and `whole_difference` compares that with what it has in the end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shoal.core.plan import (
    CHANGE_COLUMNS,
    GROW,
    JOB,
    MIGRATE,
    PAUSE,
    SHRINK,
    START,
    VERB,
    Cause,
    Placement,
)
from shoal.core.view import View


@dataclass(frozen=True, slots=True)
class Before:
    """What a job had before an event took GPUs from it, and which event that was."""

    gpus: int
    gpu_type: int
    servers: int
    placement: Placement
    cause: Cause


@dataclass(frozen=True, slots=True)
class After:
    """What the job has after the decision. `row` is -1 for a job that is held."""

    row: int
    generation: int
    gpus: int = 0
    gpu_type: int = -1
    servers: int = 0
    placement: Placement = ()


def share_of(view: View, job_id: int, placements: Mapping[int, Placement]) -> After:
    """What a job in the view has."""
    row = view.row(job_id)
    return After(
        row,
        int(view.generation[row]),
        int(view.gpus[row]),
        int(view.gpu_type[row]),
        int(view.servers[row]),
        placements.get(job_id, ()),
    )


def whole_difference(
    decided: NDArray[np.int64], before: Mapping[int, Before], after: Mapping[int, After]
) -> NDArray[np.int64]:
    """The changes of a decision (`Plan.changes`), for the jobs in `before` counted from before the events."""
    lines = [line for line in decided.tolist() if line[JOB] not in before]
    for job_id, was in before.items():
        now = after[job_id]
        if (was.gpus, was.gpu_type, was.servers, was.placement) != (
            now.gpus,
            now.gpu_type,
            now.servers,
            now.placement,
        ):
            verb = _verb(was.gpus, now.gpus)
            lines.append([now.row, job_id, now.gpus, now.gpu_type, now.servers, now.generation, verb])
    lines.sort(key=lambda line: (line[VERB] > SHRINK, line[JOB]))  # releases first
    return np.array(lines, np.int64).reshape(-1, CHANGE_COLUMNS)


def starts(
    parts: Sequence[NDArray[np.int64]], before: Mapping[int, After], after: Mapping[int, After]
) -> NDArray[np.int64]:
    """Of the changes of several decisions in one cycle: those of jobs without GPUs before, as one line per job."""
    verbs: dict[int, int] = {}
    for part in parts:
        for line in part.tolist():
            if line[JOB] not in before and line[VERB] >= START:
                verbs.setdefault(line[JOB], line[VERB])
    lines = [
        [now.row, job_id, now.gpus, now.gpu_type, now.servers, now.generation, verb]
        for job_id, verb in sorted(verbs.items())
        if (now := after[job_id]).gpus
    ]
    return np.array(lines, np.int64).reshape(-1, CHANGE_COLUMNS)


def _verb(before_gpus: int, after_gpus: int) -> int:
    """The verb of a change for a job that had GPUs."""
    if after_gpus == 0:
        return PAUSE
    return SHRINK if after_gpus < before_gpus else GROW if after_gpus > before_gpus else MIGRATE
