"""needs.csv: what one worker of each model does with its GPU.

`model,gpu_util,gpu_mem_mb[,pre_s][,post_s]`: utilisation in per cent and memory, as measured or predicted, and the
seconds before its first and after its last use of the GPU.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from shoal.scheduler.early import Phases
from shoal.scheduler.guests import Need
from shoal.sim.inputs.table import Columns, Problems, read_table
from shoal.sim.inputs.values import names, numbers
from shoal.sim.sharing import Use

COLUMNS = Columns(("model", "gpu_util", "gpu_mem_mb"), ("pre_s", "post_s"))


def read_uses(path: str | Path) -> dict[str, Use]:
    """What a worker of each model does with its GPU."""
    table = read_table(path, COLUMNS, what="table of needs")
    if not len(table):
        raise table.header_error(None, "has no models after the header", below=1)
    problems = Problems(table)
    model = names(table, problems, "model").to_list()
    percent = numbers(table, problems, "gpu_util")
    memory_mb = numbers(table, problems, "gpu_mem_mb", above=0.0)
    nothing = np.zeros(len(table))
    pre_s, post_s = (
        numbers(table, problems, column, default=0.0) if table.has(column) else nothing
        for column in ("pre_s", "post_s")
    )
    problems.add(
        percent > 100, "gpu_util", lambda row: f"is in per cent, so 100 at most, not {percent[row]:g}"
    )
    twice = np.array([name in model[:row] for row, name in enumerate(model)], np.bool_)
    problems.add(twice, "model", lambda row: f"{model[row]!r} is there twice")
    problems.raise_first()
    rows = zip(model, percent.tolist(), memory_mb.tolist(), pre_s.tolist(), post_s.tolist())
    return {m: Use(Need(mb, u / 100), Phases(pre, post)) for m, u, mb, pre, post in rows}
