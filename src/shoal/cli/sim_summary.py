"""The summary of a trace that was written, on stderr: data goes to files and stdout only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import polars as pl


def show_jobs(
    out: Path, jobs: pl.DataFrame, *, left_out: Mapping[str, int] | None = None, notes: Sequence[str] = ()
) -> None:
    """A small table of what is in the file, what was left out of it, and what to know."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(justify="right")
    table.add_column()
    table.add_row(f"{jobs.height:,}", f"jobs written to {out}")
    last_s = float(jobs["submit_s"].max() or 0)
    table.add_row(f"{last_s / 86_400:,.1f}", "days from the first to the last")
    sizes = jobs["requested_gpus"].value_counts().sort("requested_gpus").rows()
    shown = ", ".join(f"{size}: {count / jobs.height:.1%}" for size, count in sizes[:10])
    table.add_row(str(jobs["model"].n_unique()), f"models; jobs by GPUs requested: {shown}")
    if "user" in jobs.columns:
        table.add_row(f"{jobs['user'].n_unique():,}", "users")
    for why, count in (left_out or {}).items():
        table.add_row(f"{count:,}", f"left out: {why}", style="yellow")
    console = Console(stderr=True, highlight=False, markup=False, emoji=False)
    console.print(table)
    for note in notes:
        console.print(f"note: {note}", style="dim", soft_wrap=True)
