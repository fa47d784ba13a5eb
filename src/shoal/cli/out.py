"""How commands print: data to stdout, messages to stderr, plain text without a terminal."""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
from collections.abc import Sequence
from enum import StrEnum
from typing import Any

#: Minimum width of a column of words, which wrap, and the space between two columns.
_MIN_WIDTH, _BETWEEN = 10, 3


class Output(StrEnum):
    """Output format. `json` is one document, `jsonl` is one line per item."""

    TABLE = "table"
    WIDE = "wide"
    JSON = "json"
    JSONL = "jsonl"
    YAML = "yaml"
    NAME = "name"

    @property
    def for_people(self) -> bool:
        return self in (Output.TABLE, Output.WIDE)


def print_json(document: Any) -> None:
    """Print one JSON document; NaN and infinity become null."""
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


def room() -> int | None:
    """Width of the terminal, or the value of COLUMNS; None, for no limit, without either."""
    if sys.stdout.isatty():
        return shutil.get_terminal_size().columns
    columns = os.environ.get("COLUMNS", "")
    return int(columns) or None if columns.isdecimal() else None


def table(
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    right: Sequence[int] = (),
    spare: Sequence[str] = (),
) -> None:
    """Print a table; columns in `right` are numbers, aligned to the right.

    In a narrow terminal, words wrap and columns of numbers that do not fit are omitted: those in `spare` in this order,
    then the last ones first.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table

    plain, width = not sys.stdout.isatty(), room()
    cells = [[str(cell) for cell in row] for row in rows]
    console = Console(width=width or 200, soft_wrap=width is None)
    console.on_broken_pipe = _raise_broken_pipe  # type: ignore[method-assign]
    out = [] if width is None else _left_out(head, cells, right, width, spare)
    made = Table(box=box.SIMPLE_HEAD if not plain else None, pad_edge=False, show_edge=False)
    shown = [i for i in range(len(head)) if i not in out]
    for i in shown:
        # a truncated name or number could be mistaken for another
        whole = width is None or i == 0 or i in right
        made.add_column(head[i], justify="right" if i in right else "left", no_wrap=whole, overflow="fold")
    for row in cells:
        made.add_row(*[row[i] for i in shown if i < len(row)])
    console.print(made)
    if out:
        left_out = ", ".join(head[i] for i in sorted(out))
        say(f"not shown, as the terminal is too narrow: {left_out} (-o json has all)")


def _raise_broken_pipe() -> None:
    """rich would exit with code 1."""
    raise BrokenPipeError


def _left_out(
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    right: Sequence[int],
    width: int,
    spare: Sequence[str] = (),
) -> list[int]:
    """The columns of numbers to omit, so that the others fit."""
    order = {name: at - len(spare) for at, name in enumerate(spare)}

    def needs(i: int) -> int:
        longest = max(len(text) for text in (head[i], *(row[i] for row in rows if i < len(row))))
        return longest if i == 0 or i in right else min(longest, _MIN_WIDTH)

    out: list[int] = []
    for i in sorted((i for i in right if i > 1), key=lambda i: (order.get(head[i], 0), -i)):
        kept = [k for k in range(len(head)) if k not in out]
        if sum(map(needs, kept)) + _BETWEEN * (len(kept) - 1) <= width:
            break
        out.append(i)
    return out


def say(text: str) -> None:
    """Print a message to stderr, unless --quiet is given."""
    if not os.environ.get("SHOAL_QUIET"):
        print(text, file=sys.stderr)


def duration(seconds: float | None) -> str:
    """3h 25m, 2d 4h, 42s: two units at most."""
    if seconds is None or not math.isfinite(seconds):
        return "-"
    seconds = max(seconds, 0.0)
    for unit, size, small, part in (("d", 86400, "h", 3600), ("h", 3600, "m", 60), ("m", 60, "s", 1)):
        parts = math.floor(seconds / part + 0.5)  # rounded first, so that 59.7 s is shown as 1m
        if parts * part >= size:
            return f"{parts * part // size}{unit} {parts * part % size // part}{small}"
    return f"{seconds:.1f}s" if seconds < 9.95 else f"{seconds:.0f}s"


def decimal(value: float | None, places: int) -> str:
    """A number with this many decimals, or `-` for None."""
    return "-" if value is None else f"{value:.{places}f}"
