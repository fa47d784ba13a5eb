"""The summary of a trace that was written. It goes to stderr: only data goes to stdout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import polars as pl


def show_jobs(
    out: Path, jobs: pl.DataFrame, *, left_out: Mapping[str, int] | None = None, notes: Sequence[str] = ()
) -> None:
    """Print what the file contains, what was left out, and notes."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(justify="right")
    table.add_column()
    table.add_row(*_counted(jobs.height, "job", f" written to {out}"))
    if jobs.height > 1:
        amount, unit = _span(float(jobs["submit_s"].max() or 0))
        table.add_row(amount, f"{unit} from the first to the last")
    sizes = jobs["requested_gpus"].value_counts().sort("requested_gpus").rows()
    shown = ", ".join(f"{size}: {_part(count / jobs.height)}" for size, count in sizes[:10])
    table.add_row(*_counted(jobs["model"].n_unique(), "model", f"; jobs by GPUs requested: {shown}"))
    if "user" in jobs.columns:
        table.add_row(*_counted(jobs["user"].n_unique(), "user"))
    for why, count in (left_out or {}).items():
        table.add_row(f"{count:,}", f"left out: {why}", style="yellow")
    console = Console(stderr=True, highlight=False, markup=False, emoji=False)
    console.print(table)
    for note in notes:
        console.print(f"note: {note}", style="dim", soft_wrap=True)


def _counted(count: int, noun: str, rest: str = "") -> tuple[str, str]:
    """A number, and what it counts."""
    return f"{count:,}", f"{noun if count == 1 else noun + 's'}{rest}"


def _span(seconds: float) -> tuple[str, str]:
    """A duration in the largest unit that it reaches."""
    units = (("days", 86_400), ("hours", 3_600), ("minutes", 60), ("seconds", 1))
    unit, size = next((each for each in units if seconds >= each[1]), units[-1])
    return f"{seconds / size:,.1f}", unit


def _part(part: float) -> str:
    """A part in per cent; a small one is not rounded to zero."""
    return f"{part:.1%}" if part >= 0.0005 else "below 0.1%"
