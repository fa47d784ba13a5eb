"""SenseTime's Helios traces: `cluster_log.csv` of one cluster (Venus, Earth, Saturn, Uranus).

Columns: `job_id, user, vc, gpu_num, cpu_num, node_num, state, submit_time, start_time, end_time, duration,
queue`; times look like 2020-06-09 18:41:01, durations are seconds. More than half of the jobs use no GPU.
"""

from __future__ import annotations

from pathlib import Path

import polars as pl

from shoal.sim.importers.trace import Trace, times, trace_of
from shoal.sim.inputs.column_values import counts, names, numbers
from shoal.sim.inputs.table import Columns, Problems, read_table

COLUMNS = Columns(
    ("job_id", "user", "vc", "gpu_num", "submit_time", "duration"), ("state",), allow_others=True
)


def read_helios(path: str | Path) -> Trace:
    """The GPU jobs of a Helios cluster, whatever their final state."""
    table = read_table(path, COLUMNS, what="Helios cluster_log")
    problems = Problems(table, keep_all=True)
    jobs = pl.DataFrame(
        {
            "line": table.line,
            "submit_s": times(table, problems, "submit_time"),
            "service_s": numbers(table, problems, "duration"),
            "requested_gpus": counts(table, problems, "gpu_num", least=0),
            "job": names(table, problems, "job_id"),
            "user": names(table, problems, "user"),
            "vc": names(table, problems, "vc"),
        }
    )
    return trace_of(table, problems, jobs)
