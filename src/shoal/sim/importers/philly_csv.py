"""Microsoft's Philly trace as the flat csv that later simulators use.

Columns: `timestamp` (2017-10-09 07:01:55), `duration` (run time in seconds), `num_gpus`, `gpu_time`
(their product, not used) and `cluster` (virtual cluster). Rows are not sorted.
"""

from __future__ import annotations

from pathlib import Path

import polars as pl

from shoal.sim.importers.trace import Trace, times, trace_of
from shoal.sim.inputs.column_values import counts, names, numbers
from shoal.sim.inputs.table import Columns, Problems, read_table

COLUMNS = Columns(("timestamp", "duration", "num_gpus"), ("gpu_time", "cluster"), allow_others=True)


def read_philly_csv(path: str | Path) -> Trace:
    """Read the jobs of the flat Philly csv; the virtual cluster is used as the user."""
    table = read_table(path, COLUMNS, what="Philly trace")
    problems = Problems(table, keep_all=True)
    jobs = pl.DataFrame(
        {
            "line": table.line,
            "submit_s": times(table, problems, "timestamp"),
            "service_s": numbers(table, problems, "duration"),
            "requested_gpus": counts(table, problems, "num_gpus", least=0),
        }
    )
    if table.has("cluster"):
        cluster = names(table, problems, "cluster")
        jobs = jobs.with_columns(vc=cluster, user=cluster)
    return trace_of(table, problems, jobs)
