"""Alibaba's PAI trace of 2020 (cluster-trace-gpu-v2020): `pai_task_table.csv`, with `pai_job_table.csv`.

Published without header lines; files with one are read too. The task table has `job_name, task_name,
inst_num, status, start_time, end_time, plan_cpu, plan_mem, plan_gpu, gpu_type`, the job table `job_name,
inst_id, user, status, start_time, end_time`. Times are seconds; `plan_gpu` is in percent of a GPU per
instance. A job is the sum of its tasks: it asks for Σ inst_num · plan_gpu / 100 GPUs, rounded up, and
runs from the first start to the last end of its tasks with GPUs. Users and the time of submission come
from the job table next to the task table; without it, the first start counts and there are no users.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import polars as pl

from shoal.core.errors import InputError
from shoal.sim.importers.trace import BadRow, Trace, bad_rows, good_rows, leave_out
from shoal.sim.inputs.table import Columns, Problems, Table, check_text, first_fields, read_head, read_table
from shoal.sim.inputs.values import names, numbers

TASK_COLUMNS = (
    "job_name", "task_name", "inst_num", "status", "start_time", "end_time",
    "plan_cpu", "plan_mem", "plan_gpu", "gpu_type",
)  # fmt: skip
JOB_COLUMNS = ("job_name", "inst_id", "user", "status", "start_time", "end_time")


def read_alibaba_pai(path: str | Path) -> Trace:
    """The jobs of a PAI task table, or of the directory that holds the tables."""
    path = Path(path)
    if path.is_dir():
        path = path / "pai_task_table.csv"
    table = _read(path, TASK_COLUMNS)
    problems = Problems(table, keep_all=True)
    tasks = _tasks(table, problems)
    good = good_rows(table, problems)
    # A job one of whose tasks cannot be read would come out smaller than it was: all of it is bad.
    spoilt = tasks.filter(~good)["job"].unique()
    tasks = tasks.filter(good & ~tasks["job"].is_in(spoilt.to_list()))
    left_out: dict[str, int] = {}
    jobs = _jobs(tasks)
    jobs = leave_out(jobs, left_out, "used no GPU", pl.col("gpus") <= 0)
    jobs = leave_out(jobs, left_out, "not finished", pl.col("unfinished"))
    jobs = leave_out(jobs, left_out, "ran for no time", pl.col("service_s") <= 0)
    notes = []
    parts = jobs.filter(pl.col("gpus") != pl.col("gpus").ceil()).height
    if parts:
        notes.append(f"{parts:,} jobs asked for parts of GPUs: rounded up to whole ones")
    jobs = jobs.with_columns(requested_gpus=pl.col("gpus").ceil().cast(pl.Int64)).drop("gpus", "unfinished")
    bad = bad_rows(problems)
    job_table = path.with_name(path.name.replace("task", "job"))
    if job_table != path and job_table.exists():
        jobs, more_bad = _with_users(jobs, job_table)
        bad += more_bad
    else:
        notes.append("no pai_job_table.csv beside it: no users, and jobs are submitted when they start")
    return Trace(path, jobs, len(table), left_out, bad, tuple(notes))


def _read(path: Path, columns: tuple[str, ...]) -> Table:
    what = "PAI table"
    first = first_fields(check_text(read_head(path, what), path, what), ",")
    if "job_name" in first:
        return read_table(path, Columns(columns), what=what)
    if len(first) != len(columns):
        raise InputError(
            f"this line has {len(first)} fields; the table has {len(columns)}: {', '.join(columns)}",
            file=str(path),
            line=1,
        )
    return read_table(path, Columns(columns, headerless=columns), what=what)


def _tasks(table: Table, problems: Problems) -> pl.DataFrame:
    """Tasks with GPUs; start and end are null where the task has not finished."""
    times = table.frame.select(pl.col("start_time", "end_time").cast(pl.Float64, strict=False))
    start, end = times["start_time"], times["end_time"]
    for parsed in (start, end):
        text = table.frame[parsed.name]
        wrong = (text.is_not_null() & (parsed.is_null() | ~parsed.is_finite())).fill_null(True)
        problems.add(wrong.to_numpy(), parsed.name, partial(_not_seconds, text))
    backwards = (end < start).fill_null(False).to_numpy()
    problems.add(backwards, "end_time", lambda row: f"{end[row]:g} is before start_time {start[row]:g}")
    return pl.DataFrame(
        {
            "line": table.line,
            "job": names(table, problems, "job_name"),
            "start": start,
            "end": end,
            "gpus": numbers(table, problems, "inst_num", default=0.0)
            * numbers(table, problems, "plan_gpu", default=0.0)
            / 100.0,
        }
    )


def _not_seconds(text: pl.Series, row: int) -> str:
    return f"{str(text[row])[:40]!r} is not a number of seconds"


def _jobs(tasks: pl.DataFrame) -> pl.DataFrame:
    with_gpus = pl.col("gpus") > 0
    return tasks.group_by("job", maintain_order=True).agg(
        line=pl.col("line").min(),
        submit_s=pl.col("start").min().fill_null(0.0),
        service_s=(pl.col("end").filter(with_gpus).max() - pl.col("start").filter(with_gpus).min()).fill_null(
            0.0
        ),
        gpus=pl.col("gpus").sum(),
        unfinished=((pl.col("start").is_null() | pl.col("end").is_null()) & with_gpus).any(),
    )


def _with_users(jobs: pl.DataFrame, path: Path) -> tuple[pl.DataFrame, tuple[BadRow, ...]]:
    """The jobs with the user and the time of submission of the job table."""
    table = _read(path, JOB_COLUMNS)
    problems = Problems(table, keep_all=True)
    known = pl.DataFrame(
        {
            "job": names(table, problems, "job_name"),
            "user": names(table, problems, "user"),
            "submitted": table.frame["start_time"].cast(pl.Float64, strict=False),
        }
    ).filter(good_rows(table, problems))
    known = known.unique("job", keep="first", maintain_order=True)
    joined = jobs.join(known, on="job", how="left", maintain_order="left").with_columns(
        submit_s=pl.coalesce("submitted", "submit_s"), user=pl.col("user").fill_null("unknown")
    )
    bad = tuple(BadRow(row.line, row.field, f"in {path.name}: {row.message}") for row in bad_rows(problems))
    return joined.drop("submitted"), bad
