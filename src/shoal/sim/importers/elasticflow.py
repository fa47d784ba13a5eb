"""ElasticFlow's traces, csv.

Columns `job_id, submit_time, iteration, model_name, ddl, batch_size, num_gpu, duration`; the raw traces
published with it have `submission_time` and no model. As with Tiresias, the duration at the requested
size is what is kept. A job's model is `MODEL-BATCH` where the profiles have that name, else `MODEL`;
`elasticflow_profiles` makes such profiles from the directory of throughputs (one csv per model, rows by
global batch size, iterations per second by number of GPUs). Deadlines are not used.
"""

from __future__ import annotations

from pathlib import Path

import polars as pl

from shoal.core.errors import InputError
from shoal.sim.importers.durations import read_durations
from shoal.sim.importers.trace import Trace
from shoal.sim.inputs.table import Columns, Problems, check_text, first_fields, read_head, read_table
from shoal.sim.inputs.values import counts

_OPTIONAL = ("job_id", "model_name", "batch_size", "ddl")


def read_elasticflow(path: str | Path) -> Trace:
    """The jobs of an ElasticFlow trace."""
    path = Path(path)
    what = "ElasticFlow trace"
    header = first_fields(check_text(read_head(path, what), path, what), ",")
    submit = "submission_time" if "submission_time" in header else "submit_time"
    columns = Columns(("num_gpu", submit, "duration"), _OPTIONAL, allow_others=True)
    return read_durations(path, columns, what=what)


def elasticflow_profiles(path: str | Path) -> pl.DataFrame:
    """Profiles `MODEL-BATCH` from a directory of throughput tables, one csv per model."""
    files = sorted(Path(path).glob("*.csv"))
    if not files:
        raise InputError(
            "has no csv files of throughputs; give the directory with one per model", file=str(path)
        )
    return pl.concat([_throughputs(file) for file in files])


def _throughputs(path: Path) -> pl.DataFrame:
    columns = Columns(("global_batch_size",), allow_others=True)
    table = read_table(path, columns, what="table of throughputs")
    sizes = [name for name in table.frame.columns if name.isdigit()]
    if not sizes:
        raise InputError("no column is a number of GPUs", file=str(path), line=1)
    problems = Problems(table)
    batch = counts(table, problems, "global_batch_size")
    problems.raise_first()
    long = (
        table.frame.with_columns(batch=pl.Series(batch))
        .unpivot(sizes, index="batch", variable_name="gpus", value_name="speed")
        .with_columns(pl.col("gpus").cast(pl.Int64), pl.col("speed").cast(pl.Float64, strict=False))
        .filter(pl.col("speed") > 0)
    )
    return long.select(
        model=pl.lit(path.stem) + "-" + pl.col("batch").cast(pl.String),
        gpus="gpus",
        seconds_per_iteration=1.0 / pl.col("speed"),
    ).sort("model", "gpus")
