"""placements.csv: seconds per step by placement and batch, as Pollux (OSDI'21) published them.

`placement,local_bsz,step_time[,sync_time]`; a placement is the GPUs on each node as digits: 22 is two GPUs on each of
two nodes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import polars as pl

from shoal.core.errors import ShoalError
from shoal.placement.measured_profiles import iteration_times
from shoal.sim.inputs.column_values import SECONDS_PER_ITERATION, check_within, names, numbers
from shoal.sim.inputs.table import Columns, Problems, read_table

COLUMNS = Columns(("placement", "local_bsz", "step_time"), ("sync_time",))


#: A measurement: placement, batch size per GPU, seconds per step.
Measured = tuple[str, float, float]


def measured_profiles(parts: Sequence[tuple[str, Path, float]]) -> tuple[list[pl.DataFrame], list[str]]:
    """The rows of profiles.csv for each (model, file, global batch), and notes about them."""
    models = [model for model, _, _ in parts]
    for model in models:
        if models.count(model) > 1:
            raise ShoalError(
                f"{model} is given twice; a model has one profile: use another name for one of them"
            )
    frames, notes = [], []
    for model, path, global_batch in parts:
        measured = _read(path)
        frames.append(_profile_rows(model, measured, global_batch))
        notes += _beyond(model, measured, global_batch)
    return frames, notes


def _read(path: Path) -> list[Measured]:
    table = read_table(path, COLUMNS, what="table of placements")
    if not len(table):
        raise table.header_error(None, "has no measurements after the header", below=1)
    problems = Problems(table)
    placement = names(table, problems, "placement").to_list()
    wrong = np.array([not p.isdigit() or "0" in p for p in placement], np.bool_)
    problems.add(
        wrong, "placement", lambda row: f"{placement[row]!r} is not the GPUs of each node as digits, as in 22"
    )
    batch = numbers(table, problems, "local_bsz", above=0.0)
    step_s = numbers(table, problems, "step_time", above=0.0)
    step_s = check_within(step_s, problems, "step_time", SECONDS_PER_ITERATION)
    problems.raise_first()
    return list(zip(placement, batch.tolist(), step_s.tolist()))


def _profile_rows(model: str, measured: list[Measured], global_batch: float) -> pl.DataFrame:
    """The rows of profiles.csv, by GPUs and nodes, of a model that trains with this global batch."""
    rows = iteration_times(model, measured, global_batch)
    gpus, nodes, seconds = (list(column) for column in zip(*rows))
    return pl.DataFrame(
        {"model": [model] * len(rows), "gpus": gpus, "seconds_per_iteration": seconds, "nodes": nodes}
    )


def _beyond(model: str, measured: list[Measured], global_batch: float) -> list[str]:
    """A note if no placement was measured with so large a batch: all times are then multiples of measured ones."""
    most, gpus = max((batch * _gpus(placement), _gpus(placement)) for placement, batch, _ in measured)
    if global_batch <= most:
        return []
    steps = math.ceil(global_batch / most)
    return [
        f"{model}: a batch of {global_batch:g} is larger than any measured one (at most {most:g}, on {gpus} GPUs); "
        f"an iteration counts as {steps:,} steps there, and as more on fewer GPUs"
    ]


def _gpus(placement: str) -> int:
    return sum(map(int, placement))
