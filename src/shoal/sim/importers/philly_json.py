"""Microsoft's Philly trace as published: `cluster_job_log`, one JSON list of jobs.

Each job has `jobid, user, vc, submitted_time, status` and `attempts`, a list of runs with `start_time`,
`end_time` and `detail`, a list of machines with their `gpus`. Following the AFS authors, a job's size is
that of its first attempt, and its service time is the sum over all attempts with a start and an end. This
includes failed and killed jobs, which used GPUs too.
"""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import polars as pl

from shoal.core.errors import InputError
from shoal.sim.importers.trace import BadRow, Trace, count_idle
from shoal.sim.inputs.table import check_text, printable, read_head

_FORM = "%Y-%m-%d %H:%M:%S"


class _Malformed(Exception):
    """A record that is not a job: the field, and the error."""

    def __init__(self, field: str | None, message: str) -> None:
        super().__init__(message)
        self.field = field


def read_philly_json(path: str | Path) -> Trace:
    """The jobs of a `cluster_job_log`; job and user are null where the log names none."""
    path = Path(path)
    rows: list[tuple[int, float, float, int, str | None, str | None, str | None]] = []
    bad: list[BadRow] = []
    left_out: list[tuple[str, str | None]] = []
    records = _records(path)
    for number, record in enumerate(records, 1):
        try:
            submit_s, gpus, service_s, why = _job(record)
            name, user, vc = (_name(record, key) for key in ("jobid", "user", "vc"))
        except _Malformed as error:
            bad.append(BadRow(number, error.field, str(error)))
            continue
        if why:
            left_out.append((why, vc))
            continue
        rows.append((number, submit_s, service_s, gpus, name, user, vc))
    columns = ["line", "submit_s", "service_s", "requested_gpus", "job", "user", "vc"]
    types = [pl.Int64, pl.Float64, pl.Float64, pl.Int64, pl.String, pl.String, pl.String]
    jobs = pl.DataFrame(rows, schema=dict(zip(columns, types)), orient="row")
    idle = pl.DataFrame(left_out, schema={"why": pl.String, "vc": pl.String}, orient="row")
    return Trace(path, jobs, len(records), count_idle(idle), tuple(bad), place="record", idle=idle)


def _records(path: Path) -> list[Any]:
    """The list in the file. Its first bytes are checked, so that a large file of another kind is not parsed."""
    what = "cluster_job_log"
    head = read_head(path, what, "a JSON list of jobs").lstrip()
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


def _job(record: Any) -> tuple[float, int, float, str]:
    """(submission time, GPUs, service seconds, why the job is omitted or "")."""
    if not isinstance(record, dict):
        raise _Malformed(None, f"is not a job but {_shown(record)}")
    submit_s = _seconds(record, "submitted_time")
    if submit_s is None:
        raise _Malformed("submitted_time", "a value is missing here")
    attempts = _mappings(record, "attempts")
    if not attempts:
        return submit_s, 0, 0.0, "never ran"
    gpus = sum(len(_list(machine, "gpus")) for machine in _mappings(attempts[0], "detail"))
    service_s = 0.0
    for attempt in attempts:
        start_s, end_s = _seconds(attempt, "start_time"), _seconds(attempt, "end_time")
        if start_s is not None and end_s is not None:
            if end_s < start_s:
                raise _Malformed("end_time", "an attempt ends before it starts")
            service_s += end_s - start_s
    if gpus == 0:
        return submit_s, 0, 0.0, "used no GPU"
    return submit_s, gpus, service_s, "" if service_s > 0 else "ran for no time"


def _seconds(record: dict[str, Any], key: str) -> float | None:
    """A time such as 2017-10-09 07:01:55, optionally followed by the name of its zone; None if unknown."""
    text = record.get(key)
    if text is None or text in ("", "None"):
        return None
    try:
        return (datetime.strptime(text[:19], _FORM) - datetime(1970, 1, 1)).total_seconds()
    except (TypeError, ValueError, KeyError):
        raise _Malformed(key, f"{_shown(text)} is not a time such as 2017-10-09 07:01:55") from None


def _list(record: dict[str, Any], key: str) -> list[Any]:
    if key not in record:
        raise _Malformed(key, "this key is missing")
    value = record[key]
    if not isinstance(value, list):
        raise _Malformed(key, f"is not a list but {_shown(value)}")
    return value


def _mappings(record: dict[str, Any], key: str) -> list[dict[str, Any]]:
    found = _list(record, key)
    for item in found:
        if not isinstance(item, dict):
            raise _Malformed(key, f"contains {_shown(item)} instead of a mapping")
    return found


def _name(record: dict[str, Any], key: str) -> str | None:
    """A name, or a number used as a name; None if missing."""
    value = record.get(key)
    if isinstance(value, bool | float | list | dict):
        raise _Malformed(key, f"{_shown(value)} is not a name")
    return None if value is None else str(value).strip() or None


def _shown(value: Any) -> str:
    return printable(json.dumps(value, ensure_ascii=False))[:40]
