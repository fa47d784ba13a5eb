"""Traces like those of Tiresias: GPUs, submission and duration in seconds, and optionally a model."""

from __future__ import annotations

from pathlib import Path

import polars as pl

from shoal.sim.importers.trace import Trace, bad_rows, good_rows, leave_out
from shoal.sim.inputs.column_values import counts, names, numbers
from shoal.sim.inputs.table import Columns, Problems, read_table


def read_durations(path: str | Path, columns: Columns, *, what: str) -> Trace:
    """A trace whose required columns are (GPUs, submission, duration), in this order."""
    gpus, submit, duration = columns.required
    table = read_table(path, columns, what=what)
    problems = Problems(table, keep_all=True)
    jobs = pl.DataFrame(
        {
            "line": table.line,
            "submit_s": numbers(table, problems, submit),
            "service_s": numbers(table, problems, duration),
            "requested_gpus": counts(table, problems, gpus),
        }
    )
    if table.has("job_id"):
        jobs = jobs.with_columns(job=names(table, problems, "job_id"))
    if table.has("model_name"):
        jobs = jobs.with_columns(model=names(table, problems, "model_name"))
        if table.has("batch_size"):
            batch = counts(table, problems, "batch_size").astype(str)
            jobs = jobs.with_columns(variant=pl.col("model") + "-" + pl.Series(batch))
    jobs = jobs.filter(good_rows(table, problems))
    left_out: dict[str, int] = {}
    jobs = leave_out(jobs, left_out, "ran for no time", pl.col("service_s") <= 0)
    return Trace(
        table.path,
        jobs,
        len(table),
        left_out,
        bad_rows(problems),
        place=table.kind_of_place,
        model_field="model_name",
    )
