"""What the throughputs that come with a trace are made into, and how large such a file can be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from shoal.core.errors import InputError
from shoal.sim.inputs.column_values import SECONDS_PER_ITERATION

#: The published tables have about a megabyte; what is much larger is another file, given by mistake.
MOST_BYTES = 64 << 20

#: Iterations per second, least and most, of which a profile can be read back.
THROUGHPUT = (1.0 / SECONDS_PER_ITERATION[1], 1.0 / SECONDS_PER_ITERATION[0])


@dataclass(frozen=True)
class Speeds:
    """Profiles made from a format's own throughputs, with the columns of profiles.csv."""

    frame: pl.DataFrame
    notes: tuple[str, ...] = ()


def speeds_of(rows: Sequence[pl.DataFrame], path: Path) -> Speeds:
    """Profiles of tables with `throughput`, iterations per second; 0 says that the size does not run."""
    table = pl.concat(rows)
    runs = table.filter(pl.col("throughput") > 0)
    if runs.is_empty():
        raise InputError("has no throughput above 0, so no job could run", file=str(path))
    idle = table.height - runs.height
    notes = (f"{idle:,} throughputs are 0: no profile at these sizes",) if idle else ()
    keep = [name for name in ("model", "gpus", "gpu_type", "nodes") if name in table.columns]
    frame = runs.select(*keep, seconds_per_iteration=1.0 / pl.col("throughput"))
    return Speeds(frame, notes)


def check_size(path: Path) -> None:
    """The error of a file that is too large to be a table of throughputs, before it is read."""
    if path.stat().st_size > MOST_BYTES:
        size_mb = path.stat().st_size >> 20
        raise InputError(f"is too large for a table of throughputs ({size_mb:,} MB)", file=str(path), line=1)
