"""placements.csv: seconds per step by placement and batch, as Pollux (OSDI'21) published them.

`placement,local_bsz,step_time[,sync_time]`; a placement is the GPUs on each node as digits: 22 is two on each of two.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl

from shoal.placement.measured import iteration_times
from shoal.sim.inputs.table import Columns, Problems, read_table
from shoal.sim.inputs.values import SECONDS_PER_ITERATION, check_within, names, numbers

COLUMNS = Columns(("placement", "local_bsz", "step_time"), ("sync_time",))


def profile_rows(model: str, path: str | Path, global_batch: float) -> pl.DataFrame:
    """The rows of profiles.csv of a model that trains with this global batch, by GPUs and nodes."""
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
    rows = iteration_times(model, zip(placement, batch.tolist(), step_s.tolist()), global_batch)
    gpus, nodes, seconds = (list(column) for column in zip(*rows))
    return pl.DataFrame(
        {"model": [model] * len(rows), "gpus": gpus, "seconds_per_iteration": seconds, "nodes": nodes}
    )
