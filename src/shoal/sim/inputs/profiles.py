"""profiles.csv: the measured speed of each model, `model,gpus,seconds_per_iteration[,gpu_type][,nodes]`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import polars as pl

from shoal.core.errors import InputError
from shoal.core.profile import ANY_TYPE, Interpolation, Profile
from shoal.sim.inputs.table import Columns, Problems, read_table
from shoal.sim.inputs.values import counts, names, numbers

COLUMNS = Columns(("model", "gpus", "seconds_per_iteration"), ("gpu_type", "nodes"))


def read_profiles(path: str | Path, interpolation: Interpolation = "time") -> dict[str, Profile]:
    """The profile of each model, in the order of the file.

    Points need not be complete: shares between two measured points are interpolated, shares below the
    smallest or above the largest cannot run. An empty `gpu_type` holds for every type, an empty `nodes`
    for a share packed on as few nodes as possible.
    """
    table = read_table(path, COLUMNS, what="table of profiles")
    if not len(table):
        raise InputError("has no profiles after the header", file=str(path), line=2)
    problems = Problems(table)
    model = names(table, problems, "model").to_list()
    gpus = counts(table, problems, "gpus").tolist()
    seconds = numbers(table, problems, "seconds_per_iteration", above=0.0).tolist()
    gpu_type = [ANY_TYPE] * len(table)
    if table.has("gpu_type"):
        gpu_type = names(table, problems, "gpu_type", default=ANY_TYPE).to_list()
    nodes = [0] * len(table)
    if table.has("nodes"):
        nodes = counts(table, problems, "nodes", default=0).tolist()
        spread = np.array(nodes) > np.array(gpus)
        problems.add(spread, "nodes", lambda row: f"{gpus[row]} GPUs cannot be on {nodes[row]} nodes")
    keys = list(zip(model, gpu_type, nodes, gpus))
    first_row: dict[tuple[str, str, int, int], int] = {}
    twice = np.array([first_row.setdefault(key, row) != row for row, key in enumerate(keys)], np.bool_)
    problems.add(
        twice,
        "gpus",
        lambda row: (
            f"{model[row]!r} on {gpus[row]} GPUs is already on line {table.line[first_row[keys[row]]]}"
        ),
    )
    problems.raise_first()
    return _profiles(zip(model, gpu_type, gpus, nodes, seconds), interpolation)


def profiles_of(frame: pl.DataFrame, interpolation: Interpolation = "time") -> dict[str, Profile]:
    """The profiles of a table that was made here and needs no checks, with the columns of profiles.csv."""
    full = frame.select(
        "model",
        pl.col("gpu_type").fill_null(ANY_TYPE)
        if "gpu_type" in frame.columns
        else pl.lit(ANY_TYPE).alias("gpu_type"),
        "gpus",
        pl.col("nodes").fill_null(0) if "nodes" in frame.columns else pl.lit(0).alias("nodes"),
        "seconds_per_iteration",
    )
    return _profiles(full.iter_rows(), interpolation)


def _profiles(
    rows: Iterable[tuple[str, str, int, int, float]], interpolation: Interpolation
) -> dict[str, Profile]:
    by_model: dict[str, list[tuple[str, int, int, float]]] = {}
    for model, gpu_type, gpus, nodes, seconds in rows:
        by_model.setdefault(model, []).append((gpu_type, gpus, nodes, seconds))
    return {model: Profile.from_rows(model, points, interpolation) for model, points in by_model.items()}
