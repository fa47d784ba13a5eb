"""Columns of jobs.csv that say when a job may run: priority, not_before_s, after, time_limit_s, deadline_s.

`after` names jobs, separated by `|`; each may have `:success` (the default), `:failure` or `:any`: `prepare|train:any`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import polars as pl

from shoal.core.errors import did_you_mean
from shoal.core.job import After, When
from shoal.sim.inputs.column_values import column_of_numbers, numbers
from shoal.sim.inputs.table import FloatArray, Problems, Table

CONDITIONS = ("priority", "not_before_s", "after", "time_limit_s", "deadline_s")
_PRIORITIES = 1_000_000


class Conditions(NamedTuple):
    """The columns in the order of the fields of `Job`."""

    priority: list[int]
    not_before_s: list[float]
    after: list[tuple[After, ...]]
    time_limit_s: list[float | None]
    deadline_s: list[float | None]


def read_conditions(
    table: Table, problems: Problems, job: list[str], submit_s: FloatArray
) -> Conditions | None:
    """The columns; None if the table has none of them."""
    if not any(table.has(column) for column in CONDITIONS):
        return None
    n = len(table)
    deadline_s = _optional(table, problems, "deadline_s")
    late = np.array([d is not None and d <= s for d, s in zip(deadline_s, submit_s.tolist())])
    problems.add(
        late, "deadline_s", lambda row: f"{deadline_s[row]:g} is not after submit_s {submit_s[row]:g}"
    )
    return Conditions(
        _priorities(table, problems) if table.has("priority") else [0] * n,
        [t or 0.0 for t in _optional(table, problems, "not_before_s", above=False)],
        _after(table, problems, job) if table.has("after") else [()] * n,
        _optional(table, problems, "time_limit_s"),
        deadline_s,
    )


def _optional(table: Table, problems: Problems, column: str, *, above: bool = True) -> list[float | None]:
    """Numbers above 0 (or from 0); None where there is none."""
    if not table.has(column):
        return [None] * len(table)
    values = numbers(table, problems, column, default=1.0, above=0.0 if above else None).tolist()
    empty = column_of_numbers(table, column).is_null().to_list()
    return [None if none else value for none, value in zip(empty, values)]


def _priorities(table: Table, problems: Problems) -> list[int]:
    series = column_of_numbers(table, "priority")
    values = series.cast(pl.Float64, strict=False).to_list()
    empty = series.is_null().to_list()
    bad = [
        not e and (v is None or v != v or abs(v) > _PRIORITIES or v != int(v)) for e, v in zip(empty, values)
    ]
    problems.add(
        np.array(bad, np.bool_),
        "priority",
        lambda row: f"{table.text(row, 'priority')!r} is not a whole number up to {_PRIORITIES:,}",
    )
    return [0 if e or b else int(v) for e, b, v in zip(empty, bad, values)]


def _after(table: Table, problems: Problems, job: list[str]) -> list[tuple[After, ...]]:
    texts = table.frame["after"].cast(pl.String).fill_null("").to_list()
    index = {name: i for i, name in enumerate(job)}
    wrong: dict[int, str] = {}
    found: list[tuple[After, ...]] = []
    for row, text in enumerate(texts):
        items = []
        for part in filter(None, (p.strip() for p in text.split("|"))):
            name, _, when = (
                part.rpartition(":") if part not in index and ":" in part else (part, "", "success")
            )
            if name not in index:
                wrong.setdefault(row, f"there is no job {name!r}; {did_you_mean(name, job[:1000])}")
            elif when not in list(When):
                wrong.setdefault(row, f"{when!r} is not an end of a job; write success, failure or any")
            else:
                items.append(After(index[name], When(when)))
        found.append(tuple(items))
    cycle = first_in_cycle(found)
    if cycle is not None and not wrong:
        wrong[cycle] = f"{job[cycle]!r} waits for itself, directly or through other jobs"
    bad = np.zeros(len(texts), np.bool_)
    bad[list(wrong)] = True
    problems.add(bad, "after", lambda row: wrong[row])
    return found


def first_in_cycle(after: list[tuple[After, ...]]) -> int | None:
    """The first job that waits for itself through others; None if there is none."""
    waits = [len(each) for each in after]
    followers: list[list[int]] = [[] for _ in after]
    for row, each in enumerate(after):
        for other in each:
            followers[other.job_id].append(row)
    ready = [row for row, count in enumerate(waits) if count == 0]
    while ready:
        for row in followers[ready.pop()]:
            waits[row] -= 1
            if waits[row] == 0:
                ready.append(row)
    return next((row for row, count in enumerate(waits) if count > 0), None)
