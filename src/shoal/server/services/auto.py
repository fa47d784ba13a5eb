"""`gpus: auto`: the range of a job that leaves it to the server, from what earlier jobs of its owner showed.

What the choice rests on is read at once; the choosing itself, which may train a forest, is done aside.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from shoal.knowledge.auto_gpus import AutoGpus, FinishedRun, choose_gpus, trusted_speed
from shoal.knowledge.speed_models import Floats
from shoal.knowledge.unknown import Unknown
from shoal.server.api.models import AUTO, JobSpec, JobState, Resize
from shoal.server.loop.conductor import Conductor
from shoal.server.services.naming import model_word, program_name

#: So many finished jobs of the owner are looked at, the newest.
LOOKED_AT = 500


async def size_of(
    c: Conductor, spec: JobSpec, user: str, most_gpus: Callable[[JobSpec], int]
) -> AutoGpus | None:
    """GPUs for a job that leaves their number open; None for others."""
    if spec.gpus != AUTO:
        return None
    most = most_gpus(spec)
    measured = _measured(c, spec)
    rows = c.store.jobs(states=[JobState.SUCCEEDED.value], user=user, limit=LOOKED_AT)
    program = program_name(spec.command)
    finished = [run for row in rows if (run := _at_one_size(row, program)) is not None]
    resizes = spec.resize is not Resize.NEVER
    return await asyncio.to_thread(
        choose_gpus, spec.command, most, measured=measured, finished=finished, resizes=resizes
    )


def _measured(c: Conductor, spec: JobSpec) -> Floats | Unknown:
    """Speeds of jobs with the same model word, on the first type it may use that one was measured on."""
    estimator = c.profiles.estimator(spec.model or model_word(spec.command))
    types = [t for t in estimator.gpu_types() if not spec.gpu_types or t in spec.gpu_types]
    if not types:
        return Unknown("no job with this command has been measured")
    return trusted_speed(estimator.table(types[0]))


def _at_one_size(row: dict[str, Any], program: str) -> FinishedRun | None:
    """What a finished job of the same program shows, if it kept one size all along."""
    command, running_s = row["spec"]["command"], float(row["running_s"])
    if program_name(command) != program or row["resizes"] or row["restarts"] or running_s <= 0:
        return None
    if row["progress"].get("shared"):  # on its own it would have been faster
        return None
    gpus = round(float(row["gpu_s"]) / running_s)
    return FinishedRun(command, gpus, running_s) if gpus >= 1 else None
