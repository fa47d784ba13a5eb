"""needs.csv: how one worker of each model uses its GPU.

`model,gpu_util,gpu_mem_mb[,pre_s][,post_s]`: measured or predicted utilisation (in per cent) and memory, and the
seconds before its first and after its last use of the GPU.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import numpy as np

from shoal.core.errors import did_you_mean
from shoal.core.job import Job
from shoal.core.words import listed
from shoal.scheduler.sharing.colocation import Need
from shoal.scheduler.sharing.prescheduling import Phases
from shoal.sim.inputs.column_values import names, numbers
from shoal.sim.inputs.table import Columns, Problems, read_table
from shoal.sim.sharing_simulation import Use

COLUMNS = Columns(("model", "gpu_util", "gpu_mem_mb"), ("pre_s", "post_s"))


#: Maximum number of models that a note names.
_NAMED = 3


def read_uses(path: str | Path, models: Collection[str]) -> dict[str, Use]:
    """Read the GPU use of each model. A name that is not in `models` is an error."""
    table = read_table(path, COLUMNS, what="table of GPU use")
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
        percent > 100,
        "gpu_util",
        lambda row: f"is in per cent, so 100 at most, not {table.text(row, 'gpu_util')}",
    )
    unknown = np.array([bool(name) and name not in models for name in model], np.bool_)
    problems.add(
        unknown,
        "model",
        lambda row: f"no profile is of model {model[row]!r}; {did_you_mean(model[row], models)}",
    )
    twice = np.array([name in model[:row] for row, name in enumerate(model)], np.bool_)
    problems.add(twice, "model", lambda row: f"{model[row]!r} occurs twice")
    problems.raise_first()
    rows = zip(model, percent.tolist(), memory_mb.tolist(), pre_s.tolist(), post_s.tolist())
    return {m: Use(Need(mb, u / 100), Phases(pre, post)) for m, u, mb, pre, post in rows}


def jobs_without(uses: Mapping[str, Use], jobs: Sequence[Job]) -> str | None:
    """A note about jobs of models that the file does not have: they are neither co-located nor pre-scheduled."""
    left = [job.model for job in jobs if job.model not in uses]
    if not left:
        return None
    models = list(dict.fromkeys(left))
    return (
        f"no needs are known for {len(left):,} of {len(jobs):,} jobs, which neither share a GPU nor prepare early: "
        f"--needs does not name {listed(models[:_NAMED], len(models))}"
    )
