"""profiles.csv: the measured speed of each model.

`model,gpus,seconds_per_iteration[,gpu_type][,nodes][,servers]`.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import polars as pl

from shoal.core.profile import ANY_TYPE, Interpolation, Profile
from shoal.core.words import counted
from shoal.knowledge.online_speed import OnlineSpeed, server_worker_table
from shoal.knowledge.speed_models import SYNC_PS
from shoal.sim.inputs.column_values import SECONDS_PER_ITERATION, check_within, counts, names, numbers
from shoal.sim.inputs.table import Columns, FloatArray, Problems, read_table

COLUMNS = Columns(("model", "gpus", "seconds_per_iteration"), ("gpu_type", "nodes", "servers"))

#: Measured seconds per iteration by (servers, workers).
Pairs = dict[tuple[int, int], float]


def read_profiles(path: str | Path, interpolation: Interpolation = "time") -> dict[str, Profile]:
    """Read the profile of each model, in the order of the file.

    Shares between two measured points are interpolated; shares below the smallest or above the largest cannot
    run. An empty `gpu_type` means every type, an empty `nodes` a share packed on as few nodes as possible.
    """
    table = read_table(path, COLUMNS, what="table of profiles")
    if not len(table):
        raise table.header_error(None, "has no profiles after the header", below=1)
    problems = Problems(table)
    model = names(table, problems, "model").to_list()
    gpus = counts(table, problems, "gpus").tolist()
    positive = numbers(table, problems, "seconds_per_iteration", above=0.0)
    seconds = check_within(positive, problems, "seconds_per_iteration", SECONDS_PER_ITERATION).tolist()
    gpu_type = [ANY_TYPE] * len(table)
    if table.has("gpu_type"):
        gpu_type = names(table, problems, "gpu_type", default=ANY_TYPE).to_list()
    nodes = [0] * len(table)
    if table.has("nodes"):
        nodes = counts(table, problems, "nodes", default=0).tolist()
        spread = np.array(nodes) > np.array(gpus)
        problems.add(spread, "nodes", lambda row: f"{gpus[row]} GPUs cannot be on {nodes[row]} nodes")
    servers = (
        counts(table, problems, "servers", default=0).tolist() if table.has("servers") else [0] * len(table)
    )
    keys = list(zip(model, gpu_type, nodes, gpus, servers))
    first_row: dict[tuple[str, str, int, int, int], int] = {}
    twice = np.array([first_row.setdefault(key, row) != row for row, key in enumerate(keys)], np.bool_)
    problems.add(
        twice,
        "gpus",
        lambda row: f"{model[row]!r} on {gpus[row]} GPUs is already on {table.place(first_row[keys[row]])}",
    )
    with_servers = {m for m, s in zip(model, servers) if s}
    problems.add(
        np.array([m in with_servers and not s for m, s in zip(model, servers)]),
        "servers",
        lambda row: f"{model[row]!r} has servers in other rows; give their number in all of its rows",
    )
    problems.raise_first()
    plain = [r for r in zip(model, gpu_type, gpus, nodes, seconds) if r[0] not in with_servers]
    profiles = _profiles(plain, interpolation)
    for name in dict.fromkeys(m for m in model if m in with_servers):
        points = {(s, g): t for m, s, g, t in zip(model, servers, gpus, seconds) if m == name}
        speeds = _of_servers(points)
        if speeds is None:
            raise table.error(model.index(name), "servers", _more_pairs(name, points))
        profiles[name] = Profile.of_servers(name, speeds)
    return {m: profiles[m] for m in dict.fromkeys(model)}


def _of_servers(points: Pairs) -> FloatArray | None:
    """Iterations per second by [servers - 1, workers - 1], up to the largest of each; None if one is unknown.

    Optimus' model of synchronous training is fitted to the pairs, if there are enough. Measured pairs override it.
    """
    known = OnlineSpeed(SYNC_PS, assume=False)
    for (servers, workers), seconds in points.items():
        known.observe((float(servers), float(workers), 1.0), seconds)
    speeds = server_worker_table(known, *_most(points), 1.0)[1:, 1:]
    return speeds if np.isfinite(speeds).all() else None


def _more_pairs(model: str, points: Pairs) -> str:
    servers, workers = _most(points)
    return (
        f"{model!r} was measured with {counted(len(points), 'pair')} of servers and GPUs, too few to predict others; "
        f"measure {len(SYNC_PS.terms)} or more, or all {servers * workers} up to {counted(servers, 'server')} "
        f"and {counted(workers, 'GPU')}"
    )


def _most(points: Pairs) -> tuple[int, int]:
    return max(servers for servers, _ in points), max(workers for _, workers in points)


def profiles_of(frame: pl.DataFrame, interpolation: Interpolation = "time") -> dict[str, Profile]:
    """The profiles of a generated table with the columns of profiles.csv, without checks."""
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
