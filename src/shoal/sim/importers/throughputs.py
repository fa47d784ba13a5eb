"""Profiles from the throughputs that are published with a trace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from shoal.core.errors import InputError
from shoal.sim.inputs.column_values import SECONDS_PER_ITERATION

#: The published tables have about a megabyte. A much larger file was probably given by mistake.
MOST_BYTES = 64 << 20

#: Valid range of iterations per second: profiles outside of it could not be read again.
THROUGHPUT = (1.0 / SECONDS_PER_ITERATION[1], 1.0 / SECONDS_PER_ITERATION[0])


@dataclass(frozen=True)
class Speeds:
    """Profiles made from a format's own throughputs, with the columns of profiles.csv."""

    frame: pl.DataFrame
    notes: tuple[str, ...] = ()


def speeds_of(rows: Sequence[pl.DataFrame], path: Path) -> Speeds:
    """Profiles of tables with `throughput` in iterations per second; 0 means that the size does not run."""
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
    """Raise if a file is too large to be a table of throughputs, before it is read."""
    if path.stat().st_size > MOST_BYTES:
        size_mb = path.stat().st_size >> 20
        raise InputError(f"is too large for a table of throughputs ({size_mb:,} MB)", file=str(path), line=1)
