"""Gavel's traces: tab-separated lines without a header.

Seven fields `job_type, command, num_steps_arg, needs_data_dir, total_steps, arrival_time, scale_factor`, or
nine `job_type, command, num_steps_arg, needs_data_dir, total_steps, scale_factor, priority_weight, SLO,
arrival_time`. Jobs name their model and count their work in steps, so nothing has to be assigned: the
profiles come from Gavel's own throughputs (`simulation_throughputs.json`, steps per second by GPU type,
model and number of GPUs; what it measured of jobs that share a GPU is not used).
"""

from __future__ import annotations

import ast
import json
from pathlib import Path

import numpy as np
import polars as pl

from shoal.core.errors import InputError
from shoal.sim.importers.trace import Trace, bad_rows, good_rows, leave_out
from shoal.sim.inputs.table import Columns, Problems, check_text, read_head, read_table
from shoal.sim.inputs.values import names, numbers

SEVEN = (
    "job_type", "command", "num_steps_arg", "needs_data_dir", "total_steps", "arrival_time", "scale_factor",
)  # fmt: skip
NINE = (
    "job_type", "command", "num_steps_arg", "needs_data_dir", "total_steps",
    "scale_factor", "priority_weight", "SLO", "arrival_time",
)  # fmt: skip


def read_gavel(path: str | Path) -> Trace:
    """The jobs of a Gavel trace."""
    path = Path(path)
    what = "Gavel trace"
    first = check_text(read_head(path, what), path, what).split("\n", 1)[0].split("\t")
    form = {7: SEVEN, 9: NINE}.get(len(first))
    if form is None:
        raise InputError(
            f"is not a {what}: its lines have 7 or 9 fields separated by tabs, this one {len(first)}",
            file=str(path),
            line=1,
        )
    table = read_table(path, Columns(form, headerless=form, separator="\t", quotes=False), what=what)
    problems = Problems(table, keep_all=True)
    gpus = numbers(table, problems, "scale_factor")
    problems.add(gpus != np.floor(gpus), "scale_factor", lambda row: f"{gpus[row]:g} is not a whole number")
    jobs = pl.DataFrame(
        {
            "line": table.line,
            "submit_s": numbers(table, problems, "arrival_time"),
            "iterations": numbers(table, problems, "total_steps"),
            "requested_gpus": gpus.astype(np.int64),
            "model": names(table, problems, "job_type"),
        }
    )
    if form is NINE:
        weight = numbers(table, problems, "priority_weight", default=1.0)
        jobs = jobs.with_columns(weight=pl.Series(weight))
    jobs = jobs.filter(good_rows(table, problems))
    left_out: dict[str, int] = {}
    jobs = leave_out(jobs, left_out, "used no GPU", pl.col("requested_gpus") == 0)
    jobs = leave_out(jobs, left_out, "had no steps to do", pl.col("iterations") <= 0)
    return Trace(path, jobs, len(table), left_out, bad_rows(problems))


def gavel_profiles(path: str | Path) -> pl.DataFrame:
    """Profiles from Gavel's throughputs; `unconsolidated` is read as each GPU on a node of its own."""
    path = Path(path)
    read_head(path, "table of throughputs")
    try:
        table = json.loads(path.read_text("utf-8"))
        rows = [
            (model, gpus, 1.0 / speeds["null"], gpu_type.removesuffix("_unconsolidated"), nodes)
            for gpu_type, by_job in table.items()
            for key, speeds in by_job.items()
            for model, gpus in [ast.literal_eval(key)]
            for nodes in [gpus if gpu_type.endswith("_unconsolidated") else 1]
            if speeds["null"] > 0 and not (nodes == 1 and gpu_type.endswith("_unconsolidated"))
        ]
    except (ValueError, KeyError, TypeError, AttributeError, SyntaxError):
        raise InputError("is not a table of Gavel's throughputs", file=str(path)) from None
    columns = ["model", "gpus", "seconds_per_iteration", "gpu_type", "nodes"]
    return pl.DataFrame(rows, schema=columns, orient="row").sort("model", "gpu_type", "nodes", "gpus")
