"""What every importer makes of a published trace, before models are given to its jobs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import polars as pl

from shoal.core.errors import InputError, did_you_mean
from shoal.sim.inputs.table import Problems, Table

#: How many bad places an error lists before it says "and so on".
_SHOWN = 5


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that does not say what its format promises. `line` is the record's number in JSON."""

    line: int
    field: str | None
    message: str


@dataclass(frozen=True)
class Trace:
    """The jobs of a published trace.

    `jobs` has the columns line, submit_s, requested_gpus, and service_s (seconds at the requested size) or
    iterations; where the trace knows them also job, user, vc (virtual cluster) and model. Rows that say
    they are no training job of ours (no GPU, never ran) are counted in `left_out` by what they are; rows
    that make no sense are in `bad`.
    """

    path: Path
    jobs: pl.DataFrame
    rows: int
    left_out: Mapping[str, int] = field(default_factory=dict)
    bad: tuple[BadRow, ...] = ()
    #: What a reader of the result should know: "12 jobs asked for parts of GPUs; rounded up".
    notes: tuple[str, ...] = ()
    #: What a place in the file is called: "line", or "record" in JSON.
    place: str = "line"


def refuse_bad_rows(trace: Trace, *, remedy: str = "") -> None:
    """Raise one error for all bad rows: how many, where, and what to do."""
    if not trace.bad:
        return
    first = trace.bad[0]
    others = ", ".join(str(row.line) for row in trace.bad[1:_SHOWN])
    more = f"; more on {trace.place}s {others}" if others else ""
    more += ", and so on" if len(trace.bad) > _SHOWN else ""
    raise InputError(
        f"{first.message} ({len(trace.bad):,} of {trace.rows:,} rows cannot be used{more}); "
        f"correct them, or leave them out with --skip-bad{remedy}",
        file=str(trace.path),
        line=first.line,
        field=first.field,
    )


def bad_rows(problems: Problems) -> tuple[BadRow, ...]:
    """The bad rows of a table in order."""
    return tuple(
        BadRow(int(problems.table.line[row]), *problems.found[row]) for row in sorted(problems.found)
    )


def good_rows(table: Table, problems: Problems) -> pl.Series:
    """Which rows have no problem."""
    good = np.ones(len(table), np.bool_)
    good[list(problems.found)] = False
    return pl.Series(good)


def times(table: Table, problems: Problems, column: str, form: str = "%Y-%m-%d %H:%M:%S") -> pl.Series:
    """A column of dates and times as seconds; rows with another form are noted."""
    text = table.frame[column]
    parsed = text.str.to_datetime(form, strict=False, time_unit="ms")
    problems.add(text.is_null().to_numpy(), column, lambda row: "a value is missing here")
    problems.add(
        (parsed.is_null() & text.is_not_null()).to_numpy(),
        column,
        lambda row: f"{str(text[row])[:40]!r} is not a time such as 2017-10-09 07:01:55",
    )
    return (parsed.dt.epoch("ms") / 1000.0).fill_null(0.0)


def leave_out(jobs: pl.DataFrame, left_out: dict[str, int], why: str, condition: pl.Expr) -> pl.DataFrame:
    """The jobs for which `condition` does not hold; the others are counted under `why`."""
    kept = jobs.filter(~condition)
    if kept.height < jobs.height:
        left_out[why] = left_out.get(why, 0) + jobs.height - kept.height
    return kept


def only_clusters(trace: Trace, wanted: tuple[str, ...]) -> Trace:
    """The part of a trace that belongs to some virtual clusters."""
    if not wanted:
        return trace
    if "vc" not in trace.jobs.columns:
        raise InputError("this format has no virtual clusters; leave --vc out", file=str(trace.path))
    there = trace.jobs["vc"].unique().to_list()
    for name in wanted:
        if name not in there:
            raise InputError(
                f"no job is of cluster {name!r}; {did_you_mean(name, there)}",
                file=str(trace.path),
                field="vc",
            )
    left_out = dict(trace.left_out)
    jobs = leave_out(trace.jobs, left_out, "of other virtual clusters", ~pl.col("vc").is_in(wanted))
    return Trace(trace.path, jobs, trace.rows, left_out, trace.bad, trace.notes, trace.place)
