"""The common result of all importers: the jobs of a published trace, before models are assigned."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import polars as pl

from shoal.core.errors import InputError, did_you_mean
from shoal.sim.inputs.table import Problems, Table, error_at

#: How many bad rows an error lists before "and so on".
_SHOWN = 5


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that violates its format. In JSON, `line` is the number of the record."""

    line: int
    field: str | None
    message: str
    #: The additional table that contains the row; None for the trace itself.
    beside: Path | None = None


@dataclass(frozen=True)
class Trace:
    """The jobs of a published trace.

    `jobs` has the columns line, submit_s, requested_gpus, and service_s (seconds at the requested size) or
    iterations, and, if the trace has them, job, user, vc (virtual cluster) and model. Rows that are no training
    jobs (no GPU, never ran) are counted in `left_out` by reason; invalid rows are in `bad`.
    """

    path: Path
    jobs: pl.DataFrame
    rows: int
    left_out: Mapping[str, int] = field(default_factory=dict)
    bad: tuple[BadRow, ...] = ()
    #: Notes for the user: "12 jobs requested fractions of GPUs: rounded up to whole GPUs".
    notes: tuple[str, ...] = ()
    #: The unit of places in the file: "line", "row" in Parquet, "record" in JSON.
    place: str = "line"
    #: Number of rows of each additional table.
    rows_beside: Mapping[Path, int] = field(default_factory=dict)
    #: The trace's own name of the column `model`.
    model_field: str = "model"
    #: If there are virtual clusters: the jobs counted in `left_out`, with the columns why and vc.
    idle: pl.DataFrame | None = None


def refuse_bad_rows(trace: Trace, *, remedy: str = "") -> None:
    """Raise one error for all bad rows: their number and places, and what to do."""
    if not trace.bad:
        return
    first = trace.bad[0]
    bad = [row for row in trace.bad if row.beside == first.beside]
    rows = trace.rows if first.beside is None else trace.rows_beside[first.beside]
    others = ", ".join(str(row.line) for row in bad[1:_SHOWN])
    more = f"; more on {trace.place}{'s' if len(bad) > 2 else ''} {others}" if others else ""
    more += ", and so on" if len(bad) > _SHOWN else ""
    elsewhere = dict.fromkeys(row.beside.name for row in trace.bad if row.beside not in (None, first.beside))
    more += f"; more in {', '.join(elsewhere)}" if elsewhere else ""
    raise error_at(
        first.beside or trace.path,
        trace.place,
        first.line,
        first.field,
        f"{first.message} ({len(bad):,} of {rows:,} {'records' if trace.place == 'record' else 'rows'} "
        f"cannot be used{more}); correct them, or skip them with --skip-bad{remedy}",
    )


def bad_rows(problems: Problems, beside: Path | None = None) -> tuple[BadRow, ...]:
    """The bad rows of a table in order."""
    return tuple(
        BadRow(int(problems.table.line[row]), *problems.found[row], beside) for row in sorted(problems.found)
    )


def good_rows(table: Table, problems: Problems) -> pl.Series:
    """Which rows have no problem."""
    good = np.ones(len(table), np.bool_)
    good[list(problems.found)] = False
    return pl.Series(good)


def times(table: Table, problems: Problems, column: str, form: str = "%Y-%m-%d %H:%M:%S") -> pl.Series:
    """A column of dates and times as seconds; rows with another form are added to the problems."""
    text = table.frame[column]
    if isinstance(text.dtype, pl.Datetime):  # from Parquet
        parsed = text.cast(pl.Datetime("ms"))
    elif text.dtype in (pl.String, pl.Null):
        parsed = text.cast(pl.String).str.to_datetime(form, strict=False, time_unit="ms")
    else:
        raise InputError(f"contains {text.dtype}, not dates with times", file=str(table.path), field=column)
    problems.add(text.is_null().to_numpy(), column, lambda row: "a value is missing here")
    problems.add(
        (parsed.is_null() & text.is_not_null()).to_numpy(),
        column,
        lambda row: f"{str(text[row])[:40]!r} is not a time such as 2017-10-09 07:01:55",
    )
    return (parsed.dt.epoch("ms") / 1000.0).fill_null(0.0)


def leave_out(jobs: pl.DataFrame, left_out: dict[str, int], why: str, condition: pl.Expr) -> pl.DataFrame:
    """Remove the jobs for which `condition` holds, and count them under `why`."""
    kept = jobs.filter(~condition)
    if kept.height < jobs.height:
        left_out[why] = left_out.get(why, 0) + jobs.height - kept.height
    return kept


def trace_of(table: Table, problems: Problems, jobs: pl.DataFrame) -> Trace:
    """The rows of a table as a trace, without bad rows and jobs that used no GPU or ran for no time."""
    jobs, idle = _without_idle(jobs.filter(good_rows(table, problems)))
    left_out, bad = count_idle(idle), bad_rows(problems)
    return Trace(table.path, jobs, len(table), left_out, bad, place=table.kind_of_place, idle=idle)


def _without_idle(jobs: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    """The jobs that used GPUs for some time; and the others, with the reason (`why`) for omitting them."""
    no_gpu, no_time = pl.col("requested_gpus") == 0, pl.col("service_s") <= 0
    why = pl.when(no_gpu).then(pl.lit("used no GPU")).when(no_time).then(pl.lit("ran for no time"))
    jobs_with_reason = jobs.with_columns(why=why)
    keeps = pl.col("why").is_null()
    return jobs_with_reason.filter(keeps).drop("why"), jobs_with_reason.filter(~keeps)


def count_idle(idle: pl.DataFrame) -> dict[str, int]:
    """The number of omitted jobs by reason."""
    return dict(idle.group_by("why", maintain_order=True).len().iter_rows())


def only_clusters(trace: Trace, wanted: tuple[str, ...]) -> Trace:
    """The part of a trace in some virtual clusters; rows of other clusters are counted under that reason only."""
    if not wanted:
        return trace
    if trace.idle is None or "vc" not in trace.jobs.columns:
        raise InputError("this format has no virtual clusters; omit --vc", file=str(trace.path))
    there = pl.concat([trace.jobs["vc"], trace.idle["vc"]]).drop_nulls().unique().to_list()
    for name in wanted:
        if name not in there:
            raise InputError(
                f"no job belongs to cluster {name!r}; {did_you_mean(name, there)}",
                file=str(trace.path),
                field="vc",
            )
    mine = pl.col("vc").fill_null("").is_in(wanted)
    jobs, idle = trace.jobs.filter(mine), trace.idle.filter(mine)
    left_out = count_idle(idle)
    if others := trace.jobs.height + trace.idle.height - jobs.height - idle.height:
        left_out["of other virtual clusters"] = others
    return replace(trace, jobs=jobs, left_out=left_out, idle=idle)
