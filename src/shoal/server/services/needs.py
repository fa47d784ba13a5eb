"""What a job needs of its GPU, for sharing and pre-scheduling (Liquid, TPDS'21).

Each number comes from the first source that has it: the owner; finished jobs of the same command; a random forest
over the flags of finished jobs of the same program. A job whose needs are unknown has its GPUs to itself.
"""

from __future__ import annotations

import asyncio
import math
from typing import Any

from shoal.core.words import counted
from shoal.knowledge.features import task_features
from shoal.knowledge.resources import Example, ResourceEstimator
from shoal.knowledge.unknown import Unknown
from shoal.server.api.models import JobSpec, JobState
from shoal.server.services.naming import model_word, program_name
from shoal.server.store.store import Store

OWNER = "what its owner gave"
#: Finished jobs of the owner to read, newest first.
MOST_READ = 500
#: What is predicted of a job.
LABELS = ("gpu_mem_mb", "gpu_util", "pre_s", "post_s", "total_s")
#: Memory is rounded up to multiples of this, as in Liquid.
MEMORY_STEP_MB = 1024
#: Jobs of the training set on which the forest's shortfall is measured, newest first.
MOST_CHECKED = 100

#: One finished job: its command, and its measured use.
Taught = tuple[list[str], dict[str, float]]


def given_needs(spec: JobSpec) -> dict[str, Any] | None:
    """What the owner says; None if nothing."""
    given = _given(spec)
    return given | {"basis": OWNER} if given else None


async def learned_needs(store: Store, spec: JobSpec, user: str) -> dict[str, Any] | None:
    """What the owner says and, for what is left out, what earlier jobs showed; None if nothing is known."""
    given = _given(spec)
    found = await _learned(store, spec, user)
    learned, how = ({}, "") if isinstance(found, Unknown) else found
    basis = OWNER if given else ""
    if learned.keys() - given.keys():
        basis = f"{basis}, else {how}" if basis else how
    known = learned | given
    return known | {"basis": basis} if known else None


def _given(spec: JobSpec) -> dict[str, Any]:
    return spec.needs.model_dump(exclude_none=True) if spec.needs is not None else {}


async def _learned(store: Store, spec: JobSpec, user: str) -> tuple[dict[str, float], str] | Unknown:
    rows = store.jobs(states=[JobState.SUCCEEDED.value], user=user, limit=MOST_READ)
    word, program = spec.model or model_word(spec.command), program_name(spec.command)
    measured = [row for row in rows if row["progress"].get("used")]
    same = [row["progress"]["used"] for row in measured if row["model"] == word]
    if same:
        return _together(same), f"{counted(len(same), 'finished job')} of the same command"
    taught = [
        (row["spec"]["command"], row["progress"]["used"])
        for row in measured
        if program_name(row["spec"]["command"]) == program
    ]
    return await asyncio.to_thread(predict, spec.command, taught) if taught else Unknown("none has finished")


def _together(used: list[dict[str, float]]) -> dict[str, float]:
    """The maximum of the memory used, and the mean of every other label."""
    labels = [label for label in LABELS if all(label in one for one in used)]
    mean = {label: sum(one[label] for one in used) / len(used) for label in labels}
    return mean | {label: max(one[label] for one in used) for label in labels if label == "gpu_mem_mb"}


def predict(command: list[str], taught: list[Taught]) -> tuple[dict[str, float], str] | Unknown:
    """Predict by the flags of a command, from finished jobs of the same program."""
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
    """The largest amount by which the forest underestimates the memory of a job in its training set.

    A mean of leaves never reaches the largest jobs. Too low an estimate crashes a job; too high a one delays it.
    """
    short_mb = 0.0
    for command, used in taught[:MOST_CHECKED]:
        found = estimator.predict("job", task_features(command, num_gpus=1))
        if not isinstance(found, Unknown):
            short_mb = max(short_mb, used.get("gpu_mem_mb", 0.0) - found["gpu_mem_mb"])
    return short_mb
