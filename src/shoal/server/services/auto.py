"""`gpus: auto`: the server chooses the range of GPUs from what earlier jobs of the owner showed.

The store is read in the event loop. The choice itself may train a forest and runs in another thread.
"""

from __future__ import annotations

import asyncio

from shoal.knowledge.auto_gpus import AutoGpus, FinishedRun, choose_gpus, trusted_speed
from shoal.knowledge.speed_models import Floats
from shoal.knowledge.unknown import Unknown
from shoal.server.api.models import JobSpec, JobState, Resize
from shoal.server.loop.profiles import Profiles
from shoal.server.services.naming import model_word, program_name
from shoal.server.store.change import Row
from shoal.server.store.store import Store

#: Finished jobs of the owner to read, newest first.
MOST_READ = 500


async def auto_gpus(store: Store, profiles: Profiles, spec: JobSpec, user: str, most: int) -> AutoGpus:
    """GPUs for a job that leaves their number open; the cluster has `most` for it."""
    measured = _measured(profiles, spec)
    rows = store.jobs(states=[JobState.SUCCEEDED.value], user=user, limit=MOST_READ)
    program = program_name(spec.command)
    rows = [row for row in rows if program_name(row["spec"]["command"]) == program]
    finished = [run for row in rows if (run := _at_one_size(row)) is not None]
    resizes = spec.resize is not Resize.NEVER
    return await asyncio.to_thread(
        choose_gpus, spec.command, most, measured=measured, finished=finished, resizes=resizes,
        resized=len(rows) - len(finished),
    )  # fmt: skip


def _measured(profiles: Profiles, spec: JobSpec) -> Floats | Unknown:
    """Speeds of jobs with the same model word, on the first GPU type it may use that has measurements."""
    estimator = profiles.estimator(spec.model or model_word(spec.command))
    types = [t for t in estimator.gpu_types() if not spec.gpu_types or t in spec.gpu_types]
    if not types:
        return Unknown("no job with this command has been measured")
    return trusted_speed(estimator.table(types[0]))


def _at_one_size(row: Row) -> FinishedRun | None:
    """What a finished job shows, if its size never changed."""
    command, running_s = row["spec"]["command"], float(row["running_s"])
    if row["resizes"] or row["restarts"] or running_s <= 0:
        return None
    if row["progress"].get("shared"):  # it shared a GPU, and would have been faster alone
        return None
    gpus = round(float(row["gpu_s"]) / running_s)
    return FinishedRun(command, gpus, running_s) if gpus >= 1 else None
