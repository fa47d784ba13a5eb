"""Gavel's traces: tab-separated lines without a header.

Seven fields `job_type, command, num_steps_arg, needs_data_dir, total_steps, arrival_time, scale_factor`;
nine `job_type, command, num_steps_arg, needs_data_dir, total_steps, scale_factor, priority_weight, SLO,
arrival_time`; or ten, with `working_directory` after the command. Jobs name their model and give their work in
steps, so no models are assigned. The profiles come from Gavel's own throughputs
(`simulation_throughputs.json`: steps per second by GPU type, model and number of GPUs; the measurements of
co-located jobs are not used).
"""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import polars as pl

from shoal.core.errors import InputError
from shoal.sim.importers.throughputs import THROUGHPUT, Speeds, check_size, speeds_of
from shoal.sim.importers.trace import Trace, bad_rows, good_rows, leave_out
from shoal.sim.inputs.column_values import MOST_GPUS, counts, names, numbers
from shoal.sim.inputs.table import Columns, Problems, check_text, printable, read_head, read_table

SEVEN = (
    "job_type", "command", "num_steps_arg", "needs_data_dir", "total_steps", "arrival_time", "scale_factor",
)  # fmt: skip
NINE = (
    "job_type", "command", "num_steps_arg", "needs_data_dir", "total_steps",
    "scale_factor", "priority_weight", "SLO", "arrival_time",
)  # fmt: skip
TEN = (*NINE[:2], "working_directory", *NINE[2:])


def read_gavel(path: str | Path) -> Trace:
    """The jobs of a Gavel trace."""
    path = Path(path)
    what = "Gavel trace"
    first = check_text(read_head(path, what), path, what).split("\n", 1)[0].split("\t")
    form = {len(fields): fields for fields in (SEVEN, NINE, TEN)}.get(len(first))
    if form is None:
        raise InputError(
            f"is not a {what}: its lines have 7, 9 or 10 fields separated by tabs, this one {len(first)}",
            file=str(path),
            line=1,
        )
    table = read_table(path, Columns(form, headerless=form, separator="\t", quotes=False), what=what)
    problems = Problems(table, keep_all=True)
    jobs = pl.DataFrame(
        {
            "line": table.line,
            "submit_s": numbers(table, problems, "arrival_time"),
            "iterations": numbers(table, problems, "total_steps"),
            "requested_gpus": counts(table, problems, "scale_factor", least=0),
            "model": names(table, problems, "job_type"),
        }
    )
    if "priority_weight" in form:
        weight = numbers(table, problems, "priority_weight", default=1.0, above=0.0)
        jobs = jobs.with_columns(weight=pl.Series(weight))
    jobs = jobs.filter(good_rows(table, problems))
    left_out: dict[str, int] = {}
    jobs = leave_out(jobs, left_out, "used no GPU", pl.col("requested_gpus") == 0)
    jobs = leave_out(jobs, left_out, "had no steps to do", pl.col("iterations") <= 0)
    place = table.kind_of_place
    return Trace(path, jobs, len(table), left_out, bad_rows(problems), place=place, model_field="job_type")


def gavel_profiles(path: str | Path) -> Speeds:
    """Profiles from Gavel's throughputs; `unconsolidated` means each GPU on a node of its own."""
    path = Path(path)
    rows = []
    for gpu_type, by_job in _objects(path).items():
        spread = gpu_type.endswith(_SPREAD)
        for key, speeds in _mapping(by_job, path, gpu_type).items():
            where = f"{gpu_type} {key}"
            model, gpus = _job_key(key, path, gpu_type)
            throughput = _throughput(_mapping(speeds, path, where), path, where)
            if gpus > 1 or not spread:  # one GPU cannot be spread over nodes
                rows.append((model, gpus, throughput, gpu_type.removesuffix(_SPREAD), gpus if spread else 1))
    if not rows:
        raise InputError(_NOT_THROUGHPUTS, file=str(path))
    columns = ["model", "gpus", "throughput", "gpu_type", "nodes"]
    table = pl.DataFrame(rows, schema=columns, orient="row").sort("model", "gpu_type", "nodes", "gpus")
    return speeds_of([table], path)


_SPREAD = "_unconsolidated"
_NOT_THROUGHPUTS = (
    'is not a table of Gavel\'s throughputs: {GPU type: {"(\'model\', gpus)": {"null": steps per second}}}'
)


def _objects(path: Path) -> dict[str, Any]:
    """The JSON object in the file. A file that is too large or of another kind is not parsed."""
    what = "table of throughputs"
    head = read_head(path, what, "speeds in JSON")
    if not head.lstrip().startswith(b"{"):
        raise InputError(_NOT_THROUGHPUTS, file=str(path), line=1)
    check_text(head if b"\n" in head else head + b"\n", path, what)
    check_size(path)
    try:
        return _mapping(json.loads(path.read_text("utf-8"), object_pairs_hook=_once), path, None)
    except json.JSONDecodeError as error:
        message = f"is not valid JSON (it may be cut off): {error.msg}"
        raise InputError(message, file=str(path), line=error.lineno) from None
    except _Twice as error:
        raise InputError("this key occurs twice", file=str(path), field=str(error)[:80]) from None
    except (UnicodeDecodeError, RecursionError):
        raise InputError(_NOT_THROUGHPUTS, file=str(path)) from None


class _Twice(Exception):
    """A key that occurs twice in one JSON object; JSON readers would use only the last one."""


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise _Twice(key)
        found[key] = value
    return found


def _mapping(value: Any, path: Path, field: str | None) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InputError(_NOT_THROUGHPUTS, file=str(path), field=field)
    return value


def _job_key(key: str, path: Path, gpu_type: str) -> tuple[str, int]:
    try:
        model, gpus = ast.literal_eval(key)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        model, gpus = None, None
    if not (isinstance(model, str) and model.strip() and type(gpus) is int and 1 <= gpus <= MOST_GPUS):
        message = f"{printable(key)[:40]!r} is not a pair of model and GPUs such as \"('net', 4)\""
        raise InputError(message, file=str(path), field=gpu_type)
    return model, gpus


def _throughput(speeds: dict[str, Any], path: Path, where: str) -> float:
    """Steps per second of a job that does not share its GPUs; 0 if it does not run."""
    if "null" not in speeds:
        message = 'there is no speed "null", that of the job alone'
        raise InputError(message, file=str(path), field=where)
    value = speeds["null"]
    number = isinstance(value, int | float) and not isinstance(value, bool)
    low, high = THROUGHPUT
    if not number or not (value == 0 or low <= value <= high):
        message = (
            f"{str(value)[:40]} is not a number of steps per second, 0 or {low:g} to {high:g}; "
            "measure it, or remove it"
        )
        raise InputError(message, file=str(path), field=where)
    return float(value)
