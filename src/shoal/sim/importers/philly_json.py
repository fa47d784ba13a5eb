"""Microsoft's Philly trace as published: `cluster_job_log`, one JSON list of jobs.

Each job has `jobid, user, vc, submitted_time, status` and `attempts`, a list of runs with `start_time`,
`end_time` and `detail`, a list of machines with their `gpus`. Following the AFS authors, a job's size is
that of its first attempt and its service time the sum over all attempts that have a start and an end,
whatever the status: failed and killed jobs used GPUs too.
"""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import polars as pl

from shoal.core.errors import InputError
from shoal.sim.importers.trace import BadRow, Trace
from shoal.sim.inputs.table import check_text, read_head

_FORM = "%Y-%m-%d %H:%M:%S"


def read_philly_json(path: str | Path) -> Trace:
    """The jobs of a `cluster_job_log`."""
    path = Path(path)
    rows: list[tuple[int, float, float, int, str, str, str]] = []
    bad: list[BadRow] = []
    left_out: dict[str, int] = {}
    records = _records(path)
    for number, record in enumerate(records, 1):
        try:
            submit_s, gpus, service_s, why = _job(record)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            bad.append(BadRow(number, _field(error), f"not a job of a cluster_job_log: {_cause(error)}"))
            continue
        if why:
            left_out[why] = left_out.get(why, 0) + 1
            continue
        name, user, vc = (str(record.get(key, "")) for key in ("jobid", "user", "vc"))
        rows.append((number, submit_s, service_s, gpus, name, user, vc))
    columns = ["line", "submit_s", "service_s", "requested_gpus", "job", "user", "vc"]
    types = [pl.Int64, pl.Float64, pl.Float64, pl.Int64, pl.String, pl.String, pl.String]
    jobs = pl.DataFrame(rows, schema=dict(zip(columns, types)), orient="row")
    return Trace(path, jobs, len(records), left_out, tuple(bad), place="record")


def _records(path: Path) -> list[Any]:
    """The list in the file. Its first bytes must look like it: a large file of another kind is not parsed."""
    what = "cluster_job_log"
    head = read_head(path, what).lstrip()
    if not head.startswith(b"["):
        raise InputError(f"is not a {what}: it does not begin with a JSON list", file=str(path), line=1)
    if b'"attempts"' not in head and b'"submitted_time"' not in head and head.rstrip() != b"[]":
        raise InputError(
            f"is not a {what}: its first jobs have no attempts and no submitted_time", file=str(path), line=1
        )
    check_text(head if b"\n" in head else head + b"\n", path, what)
    try:
        records = json.loads(path.read_text("utf-8"))
    except json.JSONDecodeError as error:
        raise InputError(
            f"is not valid JSON (it may be cut off): {error.msg}", file=str(path), line=error.lineno
        ) from None
    except (UnicodeDecodeError, RecursionError):
        raise InputError(f"is not a {what}: it is JSON of another kind, or none", file=str(path)) from None
    return list(records)


def _job(record: dict[str, Any]) -> tuple[float, int, float, str]:
    """(submit, GPUs, service seconds, why it is left out or "")."""
    submit_s = _seconds(record["submitted_time"])
    if submit_s is None:
        raise ValueError("submitted_time is missing")
    attempts = record["attempts"]
    if not attempts:
        return submit_s, 0, 0.0, "never ran"
    gpus = sum(len(machine["gpus"]) for machine in attempts[0]["detail"])
    service_s = 0.0
    for attempt in attempts:
        start_s, end_s = _seconds(attempt.get("start_time")), _seconds(attempt.get("end_time"))
        if start_s is not None and end_s is not None:
            if end_s < start_s:
                raise ValueError("an attempt ends before it starts")
            service_s += end_s - start_s
    if gpus == 0:
        return submit_s, 0, 0.0, "used no GPU"
    return submit_s, gpus, service_s, "" if service_s > 0 else "ran for no time"


def _seconds(text: str | None) -> float | None:
    if text is None or text in ("", "None"):
        return None
    return (datetime.strptime(text[:19], _FORM) - datetime(1970, 1, 1)).total_seconds()


def _field(error: Exception) -> str | None:
    return str(error.args[0]) if isinstance(error, KeyError) else None


def _cause(error: Exception) -> str:
    return "this key is missing" if isinstance(error, KeyError) else str(error).splitlines()[0]
