"""Tables for a terminal or a pipe: aligned columns, the last one cut to fit."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Mapping, Sequence

from shoal.cli.out import room

#: Width of a table without a terminal; `-o wide` is never cut.
PLAIN_WIDTH = 100
#: Width that the last column, the text, should have at least.
LAST_WIDTH = 40
COLOURS = {
    "running": "32",
    "starting": "36",
    "pending": "33",
    "paused": "35",
    "stopping": "35",
    "failed": "31",
    "error": "31",
    "warning": "33",
    "ok": "32",
    "succeeded": "2",
    "cancelled": "2",
}


def colour_on() -> bool:
    """Colour only on a terminal, and only if NO_COLOR is not set (no-color.org)."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def table_width(*, wide: bool) -> int | None:
    return None if wide else room() or PLAIN_WIDTH


def lines(
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    width: int | None = None,
    colours: Mapping[str, str] | None = None,
    spare: Sequence[str] = (),
) -> list[str]:
    """A table as lines. Control characters in cells are escaped.

    Columns in `spare` are omitted, in this order, while the last column has too little room.
    """
    cells = [[_safe(cell) for cell in row] for row in [head, *rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    least = min(LAST_WIDTH, widths[-1])
    for name in spare:
        if width is None or width - sum(size + 2 for size in widths[:-1]) >= least:
            break
        at = cells[0].index(name)
        del widths[at]
        for row in cells:
            del row[at]
    made = []
    for row in cells:
        left = "".join(cell.ljust(size + 2) for cell, size in zip(row[:-1], widths))
        last = row[-1]
        if width is not None and len(left) + len(last) > width:
            last = last[: max(width - len(left) - 1, 0)] + "…"
        line = (left + last).rstrip()
        made.append(line if width is None else line[: max(width, 1)])
    if colours:
        made[1:] = [_coloured(line, row, colours) for line, row in zip(made[1:], cells[1:])]
    return made


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]], *, wide: bool = False) -> None:
    """Print a table, as wide as the terminal."""
    colours = COLOURS if colour_on() else None
    print("\n".join(lines(head, rows, width=table_width(wide=wide), colours=colours)))


def wrapped(head: Sequence[str], rows: Sequence[Sequence[str]], width: int | None) -> list[list[str]]:
    """The rows, with the text of the last column wrapped into further rows."""
    if width is None:
        return [list(row) for row in rows]
    left = sum(max(len(row[i]) for row in [head, *rows]) + 2 for i in range(len(head) - 1))
    made = []
    for *first, text in rows:
        beginning, *rest = textwrap.wrap(text, max(width - left, LAST_WIDTH // 2)) or [""]
        made += [[*first, beginning], *([""] * len(first) + [line] for line in rest)]
    return made


def _safe(cell: str) -> str:
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in cell)


def _coloured(line: str, row: Sequence[str], colours: Mapping[str, str]) -> str:
    """Colour the first cell that is a state."""
    for cell in row[:-1]:
        if cell in colours:
            return line.replace(f" {cell} ", f" \x1b[{colours[cell]}m{cell}\x1b[0m ", 1)
    return line
