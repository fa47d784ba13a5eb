"""Tiresias' traces: csv with `job_id, num_gpu, submit_time, iterations, model_name, duration, interval`.

`submit_time` and `duration` are seconds. Tiresias' simulator runs a job for its duration at the requested size.
The conversion keeps this duration: it computes the iterations that take as long with the given profile.
"""

from __future__ import annotations

from pathlib import Path

from shoal.sim.importers.durations import read_durations
from shoal.sim.importers.trace import Trace
from shoal.sim.inputs.table import Columns

COLUMNS = Columns(
    ("num_gpu", "submit_time", "duration"),
    ("job_id", "iterations", "model_name", "interval"),
    allow_others=True,
)


def read_tiresias(path: str | Path) -> Trace:
    """The jobs of a Tiresias trace."""
    return read_durations(path, COLUMNS, what="Tiresias trace")
