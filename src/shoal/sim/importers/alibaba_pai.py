"""Alibaba's PAI trace of 2020 (cluster-trace-gpu-v2020): `pai_task_table.csv`, with `pai_job_table.csv`.

The published files have no header lines; files with one can be read too. The task table has `job_name, task_name,
inst_num, status, start_time, end_time, plan_cpu, plan_mem, plan_gpu, gpu_type`, the job table `job_name,
inst_id, user, status, start_time, end_time`. Times are seconds; `plan_gpu` is in percent of a GPU per
instance. A job is the sum of its tasks: it requests Σ inst_num · plan_gpu / 100 GPUs, rounded up, and
runs from the first start to the last end of its tasks with GPUs. Users and submission times come from the job
table next to the task table. Without it, jobs are submitted at their first start and there are no users. The
same holds for jobs that it does not list; a note gives their number. A time of 0 means unknown, as in Alibaba's
own analysis.
"""

from __future__ import annotations

from pathlib import Path

import polars as pl

from shoal.core.errors import InputError
from shoal.sim.importers.trace import BadRow, Trace, bad_rows, good_rows, leave_out
from shoal.sim.inputs.column_values import MOST_GPUS, column_of_numbers, names, numbers
from shoal.sim.inputs.table import Columns, Problems, Table, check_text, first_fields, read_head, read_table

TASK_COLUMNS = (
    "job_name", "task_name", "inst_num", "status", "start_time", "end_time",
    "plan_cpu", "plan_mem", "plan_gpu", "gpu_type",
)  # fmt: skip
#: Upper limit of times in a trace: thirty million years.
_LONGEST_S = 1e15
JOB_COLUMNS = ("job_name", "inst_id", "user", "status", "start_time", "end_time")


def read_alibaba_pai(path: str | Path) -> Trace:
    """Read the jobs of a PAI task table, or of the directory that contains the tables."""
    path, job_table = tables_of(Path(path))
    table = _read(path, TASK_COLUMNS)
    problems = Problems(table, keep_all=True)
    tasks = _tasks(table, problems)
    good = good_rows(table, problems)
    # Without a task that cannot be read, a job would be smaller than it was: the whole job is bad.
    spoilt = tasks.filter(~good)["job"].unique()
    left_out: dict[str, int] = {}
    tasks = tasks.filter(good)
    tasks = leave_out(
        tasks, left_out, "tasks of a job with a malformed task", pl.col("job").is_in(spoilt.to_list())
    )
    jobs = _jobs(tasks)
    jobs = leave_out(jobs, left_out, "used no GPU", pl.col("gpus") <= 0)
    jobs = leave_out(jobs, left_out, "no known start", pl.col("unstarted"))
    jobs = leave_out(jobs, left_out, "not finished", pl.col("unfinished"))
    jobs = leave_out(jobs, left_out, "ran for no time", pl.col("service_s") <= 0)
    notes = []
    parts = jobs.filter(pl.col("gpus") != pl.col("gpus").ceil()).height
    if parts:
        notes.append(f"{parts:,} jobs requested fractions of GPUs: rounded up to whole GPUs")
    jobs = jobs.with_columns(requested_gpus=pl.col("gpus").ceil().cast(pl.Int64))
    jobs = jobs.drop("gpus", "unstarted", "unfinished")
    bad = bad_rows(problems)
    rows_beside: dict[Path, int] = {}
    if job_table != path and job_table.exists():
        users = _read(job_table, JOB_COLUMNS)
        rows_beside[job_table] = len(users)
        jobs, more_bad = _with_users(jobs, users, left_out, notes)
        bad += more_bad
    else:
        notes.append("no pai_job_table.csv next to it: no users, and jobs are submitted when they start")
    return Trace(
        path, jobs, len(table), left_out, bad, tuple(notes), table.kind_of_place, rows_beside=rows_beside
    )


def tables_of(path: Path) -> tuple[Path, Path]:
    """The task table and the (optional) job table, in a directory or next to a task table."""
    tasks = path / "pai_task_table.csv" if path.is_dir() else path
    return tasks, tasks.with_name(tasks.name.replace("task", "job"))


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
    """Tasks with GPUs; start and end are null if unknown."""
    start, end = (_seconds(table, problems, column) for column in ("start_time", "end_time"))
    backwards = (end < start).fill_null(False).to_numpy()
    problems.add(
        backwards,
        "end_time",
        lambda row: f"{table.text(row, 'end_time')} is before start_time {table.text(row, 'start_time')}",
    )
    instances = numbers(table, problems, "inst_num", default=0.0)
    gpus = instances * (numbers(table, problems, "plan_gpu", default=0.0) / 100.0)
    problems.add(
        ~(gpus <= MOST_GPUS),
        "plan_gpu",
        lambda row: f"{gpus[row]:g} GPUs are more than {MOST_GPUS:,}; check the numbers",
    )
    job = names(table, problems, "job_name")
    return pl.DataFrame({"line": table.line, "job": job, "start": start, "end": end, "gpus": gpus})


def _seconds(table: Table, problems: Problems, column: str) -> pl.Series:
    """A column of times in seconds; null if missing, 0, or invalid (then added to the problems)."""
    text = column_of_numbers(table, column)
    parsed = text.cast(pl.Float64, strict=False)
    good = (parsed.abs() < _LONGEST_S).fill_null(False)
    problems.add(
        (text.is_not_null() & ~good).to_numpy(),
        column,
        lambda row: f"{str(text[row])[:40]!r} is not a number of seconds",
    )
    return parsed.set(~good | (parsed == 0), None)


def _jobs(tasks: pl.DataFrame) -> pl.DataFrame:
    with_gpus = pl.col("gpus") > 0
    return tasks.group_by("job", maintain_order=True).agg(
        line=pl.col("line").min(),
        submit_s=pl.col("start").min().fill_null(0.0),
        service_s=(pl.col("end").filter(with_gpus).max() - pl.col("start").filter(with_gpus).min()).fill_null(
            0.0
        ),
        gpus=pl.col("gpus").sum(),
        unstarted=(pl.col("start").is_null() & with_gpus).any(),
        unfinished=(pl.col("end").is_null() & with_gpus).any(),
    )


def _with_users(
    jobs: pl.DataFrame, table: Table, left_out: dict[str, int], notes: list[str]
) -> tuple[pl.DataFrame, tuple[BadRow, ...]]:
    """The jobs with the user and the submission time of the job table.

    A job whose only row there is bad is omitted; a job without a row keeps its first start.
    """
    problems = Problems(table, keep_all=True)
    job = names(table, problems, "job_name")
    listed = pl.DataFrame(
        {
            "job": job,
            "user": names(table, problems, "user", optional=True),
            "submitted": _seconds(table, problems, "start_time"),
            "listed": [True] * len(table),
        }
    )
    first = listed.with_row_index().select(pl.col("index").first().over("job"))["index"]
    problems.add(
        (~job.is_first_distinct() & (job != "")).to_numpy(),
        "job_name",
        lambda row: f"{job[row][:40]!r} is already on {table.place(first[row])}; keep the row that is right",
    )
    good = good_rows(table, problems)
    known = listed.filter(good)
    spoilt = listed.filter(~good).join(known, on="job", how="anti")["job"]
    name = table.path.name
    jobs = leave_out(
        jobs, left_out, f"jobs with a malformed row in {name}", pl.col("job").is_in(spoilt.to_list())
    )
    joined = jobs.join(known, on="job", how="left", maintain_order="left")
    missing = joined["listed"].null_count()
    if missing:
        notes.append(f"{missing:,} jobs are not in {name}: submitted when they start")
    timeless = joined["submitted"].null_count() - missing
    if timeless:
        notes.append(
            f"{timeless:,} jobs have no start_time in {name}: submitted when their first task starts"
        )
    joined = joined.with_columns(submit_s=pl.coalesce("submitted", "submit_s"))
    return joined.drop("submitted", "listed"), bad_rows(problems, beside=table.path)
