"""Columns of a table as arrays of numbers and names. Each invalid value is added to the problems with its row."""

from __future__ import annotations

import numpy as np
import polars as pl

from shoal.core.errors import InputError
from shoal.sim.inputs.table import BoolArray, FloatArray, IntArray, Problems, Table

#: A larger number of GPUs is an error, and a speed curve of that length would not fit in memory.
MOST_GPUS = 1_000_000

#: Valid ranges: a nanosecond to 30 years per iteration, and submissions over 300 years. Numbers beyond them are
#: errors or in another unit, and sums of them would lose precision.
SECONDS_PER_ITERATION = (1e-9, 1e9)
ITERATIONS = (1e-9, 1e15)
SUBMIT_S = (0.0, 1e10)


def column_of_numbers(table: Table, column: str) -> pl.Series:
    """A column of numbers or text; an error if its Parquet type is neither (a date is not a number)."""
    series = table.frame[column]
    if series.dtype.is_numeric() or series.dtype in (pl.String, pl.Null):
        return series
    raise InputError(
        f"contains {series.dtype.base_type()}, not numbers; convert the column",
        file=str(table.path),
        field=column,
    )


def numbers(
    table: Table, problems: Problems, column: str, *, default: float | None = None, above: float | None = None
) -> FloatArray:
    """A column of finite numbers >= 0 (or > `above`). Invalid values become 1 and are added to the problems."""
    series = column_of_numbers(table, column)
    parsed = series.cast(pl.Float64, strict=False)
    empty = series.is_null().to_numpy()
    bad = parsed.is_null().to_numpy() & ~empty
    values = parsed.fill_null(1.0 if default is None else default).to_numpy().astype(np.float64)
    if default is None:
        problems.add(empty, column, lambda row: "a value is missing here")
    problems.add(bad, column, lambda row: f"{table.text(row, column)!r} is not a number")
    infinite = ~np.isfinite(values)
    problems.add(infinite, column, lambda row: f"must be finite, not {table.text(row, column)}")
    lowest = 0.0 if above is None else above
    low = (values < lowest) if above is None else (values <= lowest)
    wish = "must not be negative" if above is None else f"must be above {lowest:g}"
    problems.add(low & ~infinite, column, lambda row: f"{wish}, not {table.text(row, column)}")
    return np.where(infinite | low, 1.0, values)


def check_within(
    values: FloatArray, problems: Problems, column: str, bounds: tuple[float, float]
) -> FloatArray:
    """The numbers of a column. Those out of bounds become 1 and are added to the problems."""
    low, high = bounds
    outside = (values < low) | (values > high)
    problems.add(
        outside,
        column,
        lambda row: f"must be {low:g} to {high:g}, not {problems.table.text(row, column)}; check its unit",
    )
    return np.where(outside, 1.0, values)


def counts(
    table: Table, problems: Problems, column: str, *, default: int | None = None, least: int = 1
) -> IntArray:
    """A column of integers >= `least`, such as GPUs."""
    series = column_of_numbers(table, column)
    parsed = series.cast(pl.Float64, strict=False)
    empty = series.is_null().to_numpy()
    values = parsed.fill_null(1.0 if default is None else default).to_numpy().astype(np.float64)
    if default is None:
        problems.add(empty, column, lambda row: "a value is missing here")
    bad = (parsed.is_null().to_numpy() & ~empty) | ~np.isfinite(values) | (values != np.floor(values))
    problems.add(bad, column, lambda row: f"{table.text(row, column)!r} is not a whole number")
    low = ~bad & ~empty & (values < least)
    problems.add(low, column, lambda row: f"must be at least {least}, not {table.text(row, column)}")
    high = ~bad & (values > MOST_GPUS)
    problems.add(
        high, column, lambda row: f"{table.text(row, column)} is more than {MOST_GPUS:,}; check the number"
    )
    return np.where(bad | low | high, 1.0, values).astype(np.int64)


def names(
    table: Table, problems: Problems, column: str, *, default: str | None = None, optional: bool = False
) -> pl.Series:
    """A column of names; null for missing names if they are optional."""
    series = table.frame[column]
    if series.dtype.is_temporal() or series.dtype in (pl.Boolean, pl.Binary):
        raise InputError(
            f"contains {series.dtype.base_type()}, not names; convert the column",
            file=str(table.path),
            field=column,
        )
    series = series.cast(pl.String)
    # Only Parquet distinguishes empty text from null; in csv both are null.
    empty = (series.str.strip_chars() == "").fill_null(False).to_numpy()
    if default is None and not optional:
        problems.add(empty | series.is_null().to_numpy(), column, lambda row: "a value is missing here")
    else:
        problems.add(empty, column, lambda row: "the text is empty; use null, or give a name")
    if optional:
        return series
    return series.fill_null("" if default is None else default)


def positions_of(values: pl.Series) -> tuple[list[str], IntArray]:
    """The distinct values in order of first appearance, and the index of each row's value."""
    distinct = values.unique(maintain_order=True)
    index = pl.DataFrame({"value": distinct, "index": np.arange(len(distinct))})
    joined = values.to_frame("value").join(index, on="value", how="left", maintain_order="left")
    return distinct.to_list(), joined["index"].to_numpy()


def strings(column: pl.Series) -> list[str]:
    """The values of a text column."""
    values: list[str] = column.to_list()
    return values


def where_in(index: IntArray, bad: list[bool]) -> BoolArray:
    """The rows whose distinct value is marked bad."""
    return np.array(bad, np.bool_)[index] if bad else np.zeros(len(index), np.bool_)
