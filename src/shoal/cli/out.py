"""How commands print: data to stdout, words for people to stderr, plain without a terminal."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Sequence
from typing import Any


def print_json(document: Any) -> None:
    """Exactly one document on stdout; what is not a number in JSON becomes null."""
    json.dump(_clean(document), sys.stdout, indent=2, ensure_ascii=False)
    sys.stdout.write("\n")


def _clean(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(k): _clean(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(v) for v in value]
    if hasattr(value, "item"):
        return _clean(value.item())
    return value


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()) -> None:
    """A table on stdout; columns in `right` are set flush right."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    plain = not sys.stdout.isatty()
    made = Table(box=box.SIMPLE_HEAD if not plain else None, pad_edge=False, show_edge=False)
    for i, name in enumerate(head):
        first = i == 0  # it names the row: cut short, it could be that of another
        justify = "right" if i in right else "left"
        made.add_column(name, justify=justify, no_wrap=plain or first, overflow="fold")
    for row in rows:
        made.add_row(*[str(cell) for cell in row])
    Console(width=200 if plain else None, soft_wrap=plain).print(made)


def say(text: str) -> None:
    """A word for the person at the terminal; none with --quiet."""
    if not os.environ.get("SHOAL_QUIET"):
        print(text, file=sys.stderr)


def duration(seconds: float | None) -> str:
    """3h 25m, 2d 4h, 42s: two units at most."""
    if seconds is None or not math.isfinite(seconds):
        return "-"
    seconds = max(seconds, 0.0)
    for unit, size, small, part in (("d", 86400, "h", 3600), ("h", 3600, "m", 60), ("m", 60, "s", 1)):
        parts = math.floor(seconds / part + 0.5)  # rounded first, so that 59.7 s are a minute
        if parts * part >= size:
            return f"{parts * part // size}{unit} {parts * part % size // part}{small}"
    return f"{seconds:.1f}s" if seconds < 9.95 else f"{seconds:.0f}s"


def decimal(value: float | None, places: int) -> str:
    """A number, or that there is none."""
    return "-" if value is None else f"{value:.{places}f}"
