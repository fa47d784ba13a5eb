"""How many GPUs to request if the owner does not say (`--gpus auto`), after Liquid (TPDS'21).

The sources, best first:

1. measured speeds of earlier jobs with the same command;
2. run times of finished jobs of the same program, by a random forest over their flags and sizes;
3. nothing: the answer says so, and the job may have any number of GPUs from one.

The law of diminishing marginal utility turns speeds into a number of GPUs (`marginal_utility`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from shoal.core.errors import ShoalError
from shoal.core.job import GpuRange
from shoal.core.words import counted
from shoal.knowledge.counts import is_count
from shoal.knowledge.features import task_features
from shoal.knowledge.marginal_utility import LEAST, RightShare, right_share
from shoal.knowledge.online_speed import Source
from shoal.knowledge.resources import MIN_EXAMPLES, Example, ResourceEstimator
from shoal.knowledge.speed_estimator import SpeedTable
from shoal.knowledge.speed_models import Floats
from shoal.knowledge.unknown import Unknown

#: Run times at fewer distinct sizes do not show what more GPUs would gain.
MIN_SIZES = 2


@dataclass(frozen=True, slots=True)
class FinishedRun:
    """A finished job that ran at one size from start to end."""

    command: Sequence[str]
    gpus: int
    total_s: float


@dataclass(frozen=True, slots=True)
class AutoGpus:
    """The range to use and why. `known` is false if it is only a default because nothing is known."""

    gpus: GpuRange
    known: bool
    why: str


def choose_gpus(
    command: Sequence[str],
    max_gpus: int,
    *,
    measured: Floats | Unknown,
    finished: Iterable[FinishedRun],
    resizes: bool = True,
    resized: int = 0,
    least: float = LEAST,
) -> AutoGpus:
    """GPUs for a job. `measured` is the speed by share (entry 0 is 0) of jobs with the same command.

    An elastic job gets a range from one GPU to the right number. A fixed job gets exactly that number, or
    one GPU if nothing is known. `resized` more jobs of the same program finished, whose times say nothing about one
    size.
    """
    if not is_count(max_gpus):
        raise ShoalError(f"the most GPUs must be a whole number from 1 up, not {max_gpus}")
    found, basis = _by_speed(measured, max_gpus, least), "speeds measured of the same command"
    reasons = []
    if isinstance(found, Unknown):
        reasons.append(found.why)
        found, basis = (
            _by_times(command, finished, max_gpus, least, resized),
            "running times of finished jobs like it",
        )
    if isinstance(found, Unknown):
        reasons.append(found.why)
        gpus = GpuRange(1, max_gpus if resizes else 1)
        return AutoGpus(gpus, False, f"unknown, because {'; and '.join(reasons)}; using {gpus}")
    gpus = GpuRange(1 if resizes else found.gpus, found.gpus)
    return AutoGpus(gpus, True, f"{_sentence(found, max_gpus, least)}, by {basis}; using {gpus}")


def trusted_speed(table: SpeedTable | Unknown) -> Floats | Unknown:
    """Speed by share where it was measured or fitted; nan where it is only assumed."""
    if isinstance(table, Unknown):
        return table
    return np.where(table.source >= Source.FITTED, table.iterations_per_s, np.nan)


def _by_speed(measured: Floats | Unknown, max_gpus: int, least: float) -> RightShare | Unknown:
    if isinstance(measured, Unknown):
        return measured
    return right_share(measured, max_gpus=max_gpus, least=least)


def _by_times(
    command: Sequence[str], finished: Iterable[FinishedRun], max_gpus: int, least: float, resized: int
) -> RightShare | Unknown:
    runs = [run for run in finished if is_count(run.gpus) and 0 < run.total_s < np.inf]
    sizes = sorted({run.gpus for run in runs})
    if len(sizes) < MIN_SIZES:
        ran = f"{len(runs)} ran on {counted(sizes[0], 'GPU')}" if sizes else ""
        changed = f"{resized} changed size, shared a GPU or restarted" if resized else ""
        known = "; ".join(part for part in (ran, changed) if part) or "there are none"
        return Unknown(f"finished jobs of the same program do not tell what more GPUs bring ({known})")
    estimator = ResourceEstimator()
    for run in runs:
        example = Example(task_features(run.command, num_gpus=run.gpus), {"total_s": run.total_s})
        estimator.observe("job", example)
    if estimator.train("job") is not None:
        return Unknown(
            f"only {len(runs)} jobs of the same program finished at a fixed size, and {MIN_EXAMPLES} are needed"
        )
    speed = estimator.speed_by_gpus("job", task_features(command, num_gpus=1), min(max_gpus, sizes[-1]))
    if isinstance(speed, Unknown):
        return speed
    # A forest is constant between the sizes it has seen, so only those are points of the curve.
    seen = np.isin(np.arange(len(speed)), [0, *sizes])
    return right_share(np.where(seen, speed, np.nan), max_gpus=max_gpus, least=least)


def _sentence(found: RightShare, max_gpus: int, least: float) -> str:
    worth = found.marginal
    if found.gpus + 1 < len(worth):
        return (
            f"GPU {found.gpus} adds {worth[found.gpus]:.2f} of a GPU's worth "
            f"and GPU {found.gpus + 1} only {worth[found.gpus + 1]:.2f}, below {least:g}"
        )
    if found.gpus == max_gpus:
        return f"each of {found.gpus} GPUs adds at least {least:g} of a GPU's worth, and there are no more"
    return f"each of {found.gpus} GPUs adds at least {least:g} of a GPU's worth, and of more nothing is known"
