"""What a job takes of its GPU, for sharing and early starts: as its owner says, else as earlier jobs of his showed.

Best first, each number by itself: what the owner gave; jobs of the same command; a random forest over the flags of
jobs of the same program (Liquid, TPDS'21); else it is not known, and the job has GPUs to itself.
"""

from __future__ import annotations

import asyncio
import math
from typing import Any

from shoal.core.words import counted
from shoal.knowledge.features import task_features
from shoal.knowledge.resources import Example, ResourceEstimator
from shoal.knowledge.unknown import Unknown
from shoal.server.api.models import AUTO, JobSpec, JobState
from shoal.server.loop.conductor import Conductor
from shoal.server.services.naming import model_word, program_name

#: So many finished jobs of the owner are looked at, the newest.
LOOKED_AT = 500
#: What is predicted of a job.
LABELS = ("gpu_mem_mb", "gpu_util", "pre_s", "post_s", "total_s")
#: Memory is rounded up to whole ones of these, as Liquid does.
MEMORY_STEP_MB = 1024
#: A forest is held against so many jobs that it knows, the newest.
HELD_AGAINST = 100

#: One finished job: its command, and what it was measured to use.
Taught = tuple[list[str], dict[str, float]]


async def needs_of(c: Conductor, spec: JobSpec, user: str) -> dict[str, Any] | None:
    """What is known of a job that is being submitted, with its basis; None if nothing is."""
    given = spec.needs.model_dump(exclude_none=True) if spec.needs is not None else {}
    basis = "what its owner gave" if given else ""
    if c.sharing.on and spec.gpus != AUTO and spec.range.min == 1:
        found = await _learned(c, spec, user)
        learned, how = ({}, "") if isinstance(found, Unknown) else found
        if learned.keys() - given.keys():
            basis = f"{basis}, else {how}" if basis else how
        given = learned | given
    return given | {"basis": basis} if given else None


async def _learned(c: Conductor, spec: JobSpec, user: str) -> tuple[dict[str, float], str] | Unknown:
    rows = c.store.jobs(states=[JobState.SUCCEEDED.value], user=user, limit=LOOKED_AT)
    word, program = spec.model or model_word(spec.command), program_name(spec.command)
    alike = [row for row in rows if row["progress"].get("used")]
    same = [row["progress"]["used"] for row in alike if row["model"] == word]
    if same:
        return _together(same), f"{counted(len(same), 'finished job')} of the same command"
    taught = [
        (row["spec"]["command"], row["progress"]["used"])
        for row in alike
        if program_name(row["spec"]["command"]) == program
    ]
    return await asyncio.to_thread(predict, spec.command, taught) if taught else Unknown("none has finished")


def _together(used: list[dict[str, float]]) -> dict[str, float]:
    """The most memory that any of them used, and the mean of everything else."""
    labels = [label for label in LABELS if all(label in one for one in used)]
    mean = {label: sum(one[label] for one in used) / len(used) for label in labels}
    return mean | {label: max(one[label] for one in used) for label in labels if label == "gpu_mem_mb"}


def predict(command: list[str], taught: list[Taught]) -> tuple[dict[str, float], str] | Unknown:
    """By the flags of a command, from finished jobs of the same program."""
    estimator = ResourceEstimator()
    for other, used in taught:
        labels = {label: used[label] for label in LABELS if label in used}
        estimator.observe("job", Example(task_features(other, num_gpus=1), labels))
    untrained = estimator.train("job")
    found = untrained or estimator.predict("job", task_features(command, num_gpus=1))
    if isinstance(found, Unknown):
        return found
    if "gpu_mem_mb" in found:
        most_mb = found["gpu_mem_mb"] + _shortfall_mb(estimator, taught)
        found["gpu_mem_mb"] = math.ceil(most_mb / MEMORY_STEP_MB) * MEMORY_STEP_MB
    return found, f"a forest over {len(taught)} finished jobs of the same program"


def _shortfall_mb(estimator: ResourceEstimator, taught: list[Taught]) -> float:
    """The most by which the forest falls short of the memory of a job it knows.

    A mean of leaves never reaches the largest jobs, and too little memory ends a job where too much lets it wait.
    """
    short_mb = 0.0
    for command, used in taught[:HELD_AGAINST]:
        found = estimator.predict("job", task_features(command, num_gpus=1))
        if not isinstance(found, Unknown):
            short_mb = max(short_mb, used.get("gpu_mem_mb", 0.0) - found["gpu_mem_mb"])
    return short_mb
