"""ElasticFlow's traces, csv.

Columns: `job_id, submit_time, iteration, model_name, ddl, batch_size, num_gpu, duration`; the raw traces
published with it have `submission_time` and no model. As with Tiresias, the conversion keeps the duration at
the requested size. A job's model is `MODEL-BATCH` if the profiles have that name, else `MODEL`;
`elasticflow_profiles` makes such profiles from the directory of throughputs (one csv per model, rows by
global batch size, iterations per second by number of GPUs). Deadlines are not used.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl

from shoal.core.errors import InputError
from shoal.sim.importers.durations import read_durations
from shoal.sim.importers.throughputs import THROUGHPUT, Speeds, check_size, speeds_of
from shoal.sim.importers.trace import Trace
from shoal.sim.inputs.column_values import MOST_GPUS, check_within, counts, numbers
from shoal.sim.inputs.table import (
    Columns,
    Problems,
    check_header,
    check_text,
    first_fields,
    read_head,
    read_table,
)

_OPTIONAL = ("job_id", "model_name", "batch_size", "ddl")


def read_elasticflow(path: str | Path) -> Trace:
    """The jobs of an ElasticFlow trace."""
    path = Path(path)
    what = "ElasticFlow trace"
    header = first_fields(check_text(read_head(path, what), path, what), ",")
    submit = "submission_time" if "submission_time" in header else "submit_time"
    columns = Columns(("num_gpu", submit, "duration"), _OPTIONAL, allow_others=True)
    return read_durations(path, columns, what=what)


def elasticflow_profiles(path: str | Path) -> Speeds:
    """Profiles `MODEL-BATCH` from a directory of throughput tables, one csv per model."""
    path = Path(path)
    files = speed_files(path)
    if not files:
        raise InputError(
            "has no csv files of throughputs; give the directory with one per model", file=str(path)
        )
    return speeds_of([_throughputs(file) for file in files], path)


def speed_files(path: Path) -> list[Path]:
    """The tables in a directory of throughputs."""
    return sorted(path.glob("*.csv"))


def _throughputs(path: Path) -> pl.DataFrame:
    """Iterations per second by batch size and GPUs; empty cells were not measured."""
    columns = Columns(("global_batch_size",), allow_others=True)
    what = "table of throughputs"
    header = first_fields(check_text(read_head(path, what), path, what), columns.separator)
    check_header(header, columns, path)
    check_size(path)
    sizes = {name: int(name) for name in header if name.isascii() and name.isdigit()}
    if not sizes:
        raise InputError("no column is a number of GPUs", file=str(path), line=1)
    for name, gpus in sizes.items():
        if not 1 <= gpus <= MOST_GPUS or name != str(gpus):
            raise InputError(
                f"is not a number of GPUs, 1 to {MOST_GPUS:,}", file=str(path), line=1, field=name
            )
    table = read_table(path, columns, what=what)
    problems = Problems(table)
    batch = pl.Series(counts(table, problems, "global_batch_size"))
    problems.add(
        (~batch.is_first_distinct()).to_numpy(),
        "global_batch_size",
        lambda row: f"the batch size {batch[row]} already occurs in a line above",
    )
    speeds = {name: numbers(table, problems, name, default=0.0) for name in sizes}
    for name, speed in speeds.items():
        check_within(np.where(speed == 0, 1.0, speed), problems, name, THROUGHPUT)  # 0: it does not run
    problems.raise_first()
    by_size = [
        pl.DataFrame({"batch": batch, "throughput": speeds[name]})
        .filter(table.frame[name].is_not_null())
        .with_columns(gpus=pl.lit(gpus, pl.Int64))
        for name, gpus in sizes.items()
    ]
    return (
        pl.concat(by_size)
        .select("gpus", "throughput", model=pl.lit(path.stem) + "-" + pl.col("batch").cast(pl.String))
        .sort("model", "gpus")
    )
