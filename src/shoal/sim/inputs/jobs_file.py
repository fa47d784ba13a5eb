"""jobs.csv (or Parquet): one job per row, in order of submission.

Columns: `submit_s, model, iterations, requested_gpus, max_gpus`, and optionally `job, user, min_gpus,
step_gpus` (shares are multiples of it), `gpu_types` (separated by `|`), `kind` (all-reduce, parameter-server),
`weight`, `autoscale` (the heuristic of the autoscaler, such as `efficiency:threshold=0.5`), and those of
`job_conditions`: `priority, not_before_s, after, time_limit_s, deadline_s`.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path

import numpy as np
import polars as pl

from shoal.core.cluster import Cluster, User
from shoal.core.errors import ShoalError, did_you_mean
from shoal.core.job import GpuRange, Job, Kind
from shoal.core.profile import Profile
from shoal.sim.inputs.column_values import (
    ITERATIONS,
    SUBMIT_S,
    check_within,
    counts,
    names,
    numbers,
    positions_of,
    strings,
    where_in,
)
from shoal.sim.inputs.job_conditions import CONDITIONS, Conditions, read_conditions
from shoal.sim.inputs.size_limits import Limits
from shoal.sim.inputs.table import Columns, FloatArray, IntArray, Problems, Table, printable, read_table

COLUMNS = Columns(
    ("submit_s", "model", "iterations", "requested_gpus", "max_gpus"),
    ("job", "user", "min_gpus", "step_gpus", "gpu_types", "kind", "weight", "autoscale", *CONDITIONS),
)
DEFAULT_USER = "default"

#: For a file above this size, the first rows are checked before the whole file is read.
_LARGE_BYTES = 64 << 20
_FIRST_ROWS = 10_000


def read_jobs(
    path: str | Path,
    profiles: Mapping[str, Profile],
    cluster: Cluster,
    profiles_file: str | Path | None = None,
) -> tuple[Job, ...]:
    """Read the jobs of a trace and check them against the profiles and the cluster.

    A job's range is limited to what its profile and the cluster allow; a request outside of that is an error. The
    error about a model without a profile names `profiles_file`, if given.
    """
    path = Path(path)
    if path.exists() and path.stat().st_size > _LARGE_BYTES:
        first = read_table(path, COLUMNS, what="trace", max_rows=_FIRST_ROWS)
        _checked(first, profiles, cluster, profiles_file)
    table = read_table(path, COLUMNS, what="trace")
    if not len(table):
        raise table.header_error(None, "the trace is empty: there is no job after the header", below=1)
    return _jobs(_checked(table, profiles, cluster, profiles_file))


def cluster_with_users_of(cluster: Cluster, jobs: Iterable[Job]) -> Cluster:
    """The cluster with the users of the jobs, one ticket each, unless it has users of its own."""
    if cluster.users:
        return cluster
    return cluster.with_users(User(name) for name in dict.fromkeys(job.user for job in jobs))


@dataclass(frozen=True)
class _Checked:
    """The columns of a trace after all checks, one entry per job."""

    name: list[str]
    submit_s: list[float]
    model: list[str]
    iterations: list[float]
    requested_gpus: list[int]
    min_gpus: list[int]
    max_gpus: list[int]
    step_gpus: list[int]
    user: list[str]
    gpu_types: list[tuple[str, ...]]
    kind: list[Kind]
    weight: list[float]
    autoscale: list[str]
    conditions: Conditions | None


def _jobs(rows: _Checked) -> tuple[Job, ...]:
    ranges: dict[tuple[int, int, int], GpuRange] = {}
    bounds = [
        ranges.get(key) or ranges.setdefault(key, GpuRange(*key))
        for key in zip(rows.min_gpus, rows.max_gpus, rows.step_gpus)
    ]
    columns = (
        rows.name, rows.submit_s, bounds, rows.requested_gpus, rows.user, rows.model,
        rows.iterations, rows.kind, rows.gpu_types, rows.weight, repeat(1.0), rows.autoscale,
    )  # fmt: skip
    if rows.conditions is not None:
        columns = (*columns, *rows.conditions)  # type: ignore[assignment]
    # With a million new objects, the garbage collector would scan all of them many times for nothing.
    collecting = gc.isenabled()
    gc.disable()
    try:
        return tuple(map(Job, *columns))
    finally:
        if collecting:
            gc.enable()


def _checked(
    table: Table, profiles: Mapping[str, Profile], cluster: Cluster, profiles_file: str | Path | None
) -> _Checked:
    problems = Problems(table)
    submit_s = check_within(numbers(table, problems, "submit_s"), problems, "submit_s", SUBMIT_S)
    _check_order(submit_s, problems)
    iterations = numbers(table, problems, "iterations", above=0.0)
    iterations = check_within(iterations, problems, "iterations", ITERATIONS)
    requested = counts(table, problems, "requested_gpus")
    max_gpus = counts(table, problems, "max_gpus")
    least = (
        counts(table, problems, "min_gpus", default=1) if table.has("min_gpus") else np.ones_like(requested)
    )
    step = (
        counts(table, problems, "step_gpus", default=1) if table.has("step_gpus") else np.ones_like(requested)
    )
    if not table.has("min_gpus"):
        least = step
    _check_range(least, requested, max_gpus, problems)
    _check_step(step, {"min_gpus": least, "requested_gpus": requested, "max_gpus": max_gpus}, problems)

    model = names(table, problems, "model")
    limits = Limits.of(table, problems, model, profiles, cluster, profiles_file)
    limits.check(requested, problems)
    weight = numbers(table, problems, "weight", default=1.0, above=0.0) if table.has("weight") else None
    kind = _kinds(table, problems)
    _check_step_kind(step, kind, problems)
    autoscale = _autoscale(table, problems)
    user = _users(table, problems, cluster)
    job = _job_names(table, problems)
    conditions = read_conditions(table, problems, job, submit_s)
    problems.raise_first()
    low = -(-np.maximum(least, limits.smallest) // step) * step
    high = np.minimum(max_gpus, limits.largest) // step * step
    return _Checked(
        name=job,
        submit_s=submit_s.tolist(),
        model=model.to_list(),
        iterations=iterations.tolist(),
        requested_gpus=requested.tolist(),
        min_gpus=low.tolist(),
        max_gpus=high.tolist(),
        step_gpus=step.tolist(),
        user=user,
        gpu_types=limits.gpu_types,
        kind=kind,
        weight=[1.0] * len(table) if weight is None else weight.tolist(),
        autoscale=autoscale,
        conditions=conditions,
    )


def _check_order(submit_s: FloatArray, problems: Problems) -> None:
    backwards = np.diff(submit_s, prepend=submit_s[:1]) < 0
    text = problems.table.text
    problems.add(
        backwards,
        "submit_s",
        lambda row: (
            f"{text(row, 'submit_s')} is before the job above it ({text(row - 1, 'submit_s')}); "
            "sort the file by submit_s"
        ),
    )


def _check_range(least: IntArray, requested: IntArray, most: IntArray, problems: Problems) -> None:
    problems.add(least > most, "min_gpus", lambda row: f"min {least[row]} is above max {most[row]}")
    problems.add(
        requested > most,
        "requested_gpus",
        lambda row: f"{requested[row]} is above the job's max_gpus {most[row]}",
    )
    problems.add(
        requested < least,
        "requested_gpus",
        lambda row: f"{requested[row]} is below the job's min_gpus {least[row]}",
    )


def _check_step(step: IntArray, sizes: Mapping[str, IntArray], problems: Problems) -> None:
    for name, size in sizes.items():
        _check_multiple(name, size, step, problems)


def _check_multiple(name: str, size: IntArray, step: IntArray, problems: Problems) -> None:
    problems.add(
        size % step != 0,
        name,
        lambda row: f"{size[row]} is no multiple of the job's step_gpus {step[row]}",
    )


def _check_step_kind(step: IntArray, kind: list[Kind], problems: Problems) -> None:
    if (step > 1).any():
        servers = np.array([k is Kind.PARAMETER_SERVER for k in kind])
        problems.add((step > 1) & servers, "step_gpus", lambda row: "a step is for all-reduce jobs only")


def _kinds(table: Table, problems: Problems) -> list[Kind]:
    if not table.has("kind"):
        return [Kind.ALL_REDUCE] * len(table)
    texts, index = positions_of(names(table, problems, "kind", default=Kind.ALL_REDUCE.value))
    known = {kind.value: kind for kind in Kind}
    problems.add(
        where_in(index, [text not in known for text in texts]),
        "kind",
        lambda row: f"unknown kind {texts[index[row]]!r}; {did_you_mean(texts[index[row]], known)}",
    )
    kinds = [known.get(text, Kind.ALL_REDUCE) for text in texts]
    return [kinds[i] for i in index.tolist()]


def _autoscale(table: Table, problems: Problems) -> list[str]:
    if not table.has("autoscale"):
        return [""] * len(table)
    column = table.frame["autoscale"].cast(pl.String).fill_null("")
    texts, index = positions_of(column)
    wrong = [_mistake_in(text) if text else None for text in texts]
    bad = where_in(index, [why is not None for why in wrong])
    problems.add(bad, "autoscale", lambda row: str(wrong[index[row]]))
    return strings(column)


def _mistake_in(word: str) -> str | None:
    from shoal.knowledge.size_search import Autoscale

    try:
        Autoscale.parse(word)
    except ShoalError as error:
        return str(error)
    return None


def _users(table: Table, problems: Problems, cluster: Cluster) -> list[str]:
    """The user of each job: one of the cluster's users if it has any, else any name."""
    named = [user.name for user in cluster.users]
    default = named[0] if len(named) == 1 else DEFAULT_USER
    if table.has("user"):
        column = names(table, problems, "user", default=default)
    elif named and default not in named:
        raise table.header_error(
            "user",
            f"this column is missing, and the cluster names users ({printable(', '.join(named)[:80])}): "
            "name the user of each job, or remove the users from the cluster",
        )
    else:
        return [default] * len(table)
    if named:
        texts, index = positions_of(column)
        there = set(named)
        problems.add(
            where_in(index, [text not in there for text in texts]),
            "user",
            lambda row: f"the cluster has no user {column[row]!r}; {did_you_mean(column[row], named)}",
        )
    return strings(column)


def _job_names(table: Table, problems: Problems) -> list[str]:
    """The names of the jobs, `job1`, `job2`, ... for those without; all different."""
    numbered = pl.Series([f"job{i}" for i in range(1, len(table) + 1)])
    if not table.has("job"):
        return strings(numbered)
    column = names(table, problems, "job", optional=True)
    column = column.zip_with(column.is_not_null(), numbered)
    first = column.is_first_distinct().to_numpy()
    problems.add(
        ~first,
        "job",
        lambda row: (
            f"the name {column[row]!r} is already on {table.place(_first_row(column, row))}; "
            "names must differ"
        ),
    )
    return strings(column)


def _first_row(column: pl.Series, row: int) -> int:
    return int((column == column[row]).arg_max() or 0)
