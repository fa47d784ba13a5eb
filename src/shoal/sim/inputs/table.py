"""A table read from a file, with the line of every row. All readers and importers use it.

Values are checked column by column. Of all problems found, the first one in the file is raised, so that the error
does not depend on the order of the checks.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import polars as pl
from numpy.typing import NDArray

from shoal.core.errors import InputError, did_you_mean
from shoal.sim.inputs.line_index import scan_lines, unclosed_quote

BoolArray = NDArray[np.bool_]
IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]

#: Bytes that are checked to see whether a file is a table at all.
HEAD_BYTES = 64 << 10
_PARQUET_MAGIC = b"PAR1"
NOT_UTF8 = "contains bytes that are not UTF-8 text; save the file as UTF-8"


@dataclass(frozen=True)
class Columns:
    """The columns of a format."""

    required: tuple[str, ...]
    optional: tuple[str, ...] = ()
    #: Whether other columns are ignored. Published traces have unused columns; in our own format they are errors.
    allow_others: bool = False
    #: The columns of a file without a header line.
    headerless: tuple[str, ...] = ()
    separator: str = ","
    #: Whether fields may be quoted. False for formats with shell commands in a field.
    quotes: bool = True

    @property
    def known(self) -> tuple[str, ...]:
        return self.required + self.optional


@dataclass
class Table:
    """The rows of a file as text columns (typed, from Parquet), and the line of each row."""

    path: Path
    frame: pl.DataFrame
    #: Line of each row; for Parquet, the number of the row from 1.
    line: IntArray
    has_lines: bool = True
    #: Rows with a wrong number of fields, ascending, and the message for such a row.
    ragged: IntArray = field(default_factory=lambda: np.zeros(0, np.int64))
    ragged_message: Callable[[int], str] = str

    def __len__(self) -> int:
        return int(self.frame.height)

    def has(self, column: str) -> bool:
        return column in self.frame.columns

    def error(self, row: int, column: str | None, message: str) -> InputError:
        """An error about one value, with its line."""
        return error_at(self.path, self.kind_of_place, int(self.line[row]), column, message)

    @property
    def kind_of_place(self) -> str:
        return "line" if self.has_lines else "row"

    def place(self, row: int) -> str:
        """The place of a row, such as "line 7"."""
        return f"{self.kind_of_place} {self.line[row]}"

    def text(self, row: int, column: str) -> str:
        """A value as written in the file, shortened to one line: `1e400`, not inf."""
        return shortened(str(self.frame[column][row]))

    def header_error(self, column: str | None, message: str, *, below: int = 0) -> InputError:
        """An error about a whole column, or (`below`) about what should follow the header."""
        line = 1 + below if self.has_lines else None
        return InputError(message, file=str(self.path), line=line, field=column)


def error_at(path: Path, place: str, number: int, field: str | None, message: str) -> InputError:
    """An error at a line, which an editor can jump to, or at a row or record, which only the message names."""
    if place == "line":
        return InputError(message, file=str(path), line=number, field=field)
    return InputError(f"{place} {number}: {message}", file=str(path), field=field)


@dataclass
class Problems:
    """The problems of a table; the first one of each row is kept."""

    table: Table
    found: dict[int, tuple[str | None, str]] = field(default_factory=dict)
    #: Keep all bad rows (importers count them) instead of the first one (readers stop there).
    keep_all: bool = False

    def __post_init__(self) -> None:
        table = self.table
        for row in table.ragged if self.keep_all else table.ragged[:1]:
            self.found.setdefault(int(row), (None, table.ragged_message(int(row))))

    def add(self, bad: BoolArray, column: str, message: Callable[[int], str]) -> None:
        """Add a problem for each row in `bad`."""
        rows = np.flatnonzero(bad)
        for row in rows if self.keep_all else rows[:1]:
            self.found.setdefault(int(row), (column, message(int(row))))

    def raise_first(self) -> None:
        if self.found:
            row = min(self.found)
            raise self.table.error(row, *self.found[row])


def read_table(path: str | Path, columns: Columns, *, what: str, max_rows: int | None = None) -> Table:
    """Read a csv or Parquet file (by content, not by name). `what` names the file in errors, such as "trace"."""
    path = Path(path)
    head = read_head(path, what)
    if head.startswith(_PARQUET_MAGIC):
        return _read_parquet(path, columns, what)
    text = check_text(head, path, f"{what} in csv or Parquet")
    header = list(columns.headerless) or first_fields(text, columns.separator)
    if path.suffix == ".parquet" and not set(header) & set(columns.required):
        needed = ", ".join(columns.required)
        raise InputError(f"is neither Parquet nor csv with the columns {needed}", file=str(path), line=1)
    check_header(header, columns, path)
    return _read_text(path, header, columns, max_rows)


def read_head(path: Path, what: str, needs: str = "a header and at least one row") -> bytes:
    """The first bytes of a file; an error if it cannot be read or is empty."""
    try:
        if path.is_dir():
            raise InputError(f"is a directory; give the {what} file in it", file=str(path))
        with path.open("rb") as file:
            head = file.read(HEAD_BYTES)
        if head and not path.is_file():
            raise InputError(f"is not a regular file; write the {what} to a file first", file=str(path))
    except FileNotFoundError:
        raise InputError(f"there is no such file; check the path of the {what}", file=str(path)) from None
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror or error}", file=str(path)) from None
    if not head.strip():
        raise InputError(f"is empty; {a(what)} needs {needs}", file=str(path), line=1)
    return head


def a(what: str) -> str:
    """A noun with its article."""
    return f"{'an' if what[0] in 'AEIOaeio' else 'a'} {what}"


def check_text(head: bytes, path: Path, what: str) -> str:
    """The head as text; an error if the file is not text."""

    def at_line(byte: int, message: str) -> InputError:
        return InputError(message, file=str(path), line=1 + head.count(b"\n", 0, byte))

    if b"\0" in head:
        raise at_line(head.index(b"\0"), f"is not {a(what)}: it holds binary data, not text")
    complete = head if len(head) < HEAD_BYTES else head[: max(head.rfind(b"\n"), 0)]
    if not complete:
        raise InputError(f"is not {a(what)}: its first line has no end", file=str(path), line=1)
    try:
        return complete.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise at_line(error.start, NOT_UTF8) from None


def first_fields(text: str, separator: str) -> list[str]:
    """The fields of the first line."""
    line = text.split("\n", 1)[0].replace("\r", " ")
    return [name.strip() for name in next(csv.reader([line], delimiter=separator), [])]


def printable(text: str) -> str:
    """A name from a file, made printable for a one-line message."""
    return "".join(char if char.isprintable() else "?" for char in text)


def shortened(text: str, most: int = 40) -> str:
    """A value from a file, shortened with an ellipsis for a message."""
    return printable(text if len(text) <= most else f"{text[: most - 1]}…")


def check_header(header: Sequence[str], columns: Columns, path: Path, line: int | None = 1) -> None:
    """Check that the header has all required columns, none twice, and no unknown one (unless allowed).

    `line` is the line of the header; None if there are no lines, as in Parquet.
    """
    header = [printable(name) for name in header]
    for name in header:
        if header.count(name) > 1:
            raise InputError("this column occurs twice", file=str(path), line=line, field=name or "(no name)")
    missing = [name for name in columns.required if name not in header]
    unknown = [name for name in header if name not in columns.known]
    if len(missing) == len(columns.required) and not columns.allow_others:
        seen = ", ".join(header[:8])[:80]
        found = "has no" if line is None else "the first line is not a header with"
        raise InputError(
            f"{found} columns {', '.join(columns.required)}; it reads {seen!r}", file=str(path), line=line
        )
    if unknown and not columns.allow_others:
        raise InputError(
            f"unknown column; {_column_meant(unknown[0], header, columns)}",
            file=str(path),
            line=line,
            field=unknown[0] or "(no name)",
        )
    if missing:
        raise InputError(
            f"this column is missing; the header has {', '.join(header)[:120]}",
            file=str(path),
            line=line,
            field=missing[0],
        )


def _column_meant(name: str, header: Sequence[str], columns: Columns) -> str:
    """A hint for an unknown column: a similar missing column, else all known columns."""
    hint = did_you_mean(name, [known for known in columns.known if known not in header])
    return hint if hint.startswith("did you mean") else f"known: {', '.join(columns.known)}"


def _read_text(path: Path, header: list[str], columns: Columns, max_rows: int | None) -> Table:
    first = 0 if columns.headerless else 1
    most = None if max_rows is None else max_rows + first
    lines = scan_lines(path, columns.separator, most, quotes=columns.quotes)
    try:
        frame = pl.read_csv(
            path,
            has_header=False,
            new_columns=header,
            n_rows=most,
            schema=dict.fromkeys(header, pl.String),
            separator=columns.separator,
            quote_char='"' if columns.quotes else None,
            truncate_ragged_lines=True,
            encoding="utf8-lossy",
        )
    except pl.exceptions.PolarsError:
        raise unclosed_quote(path, int(lines.line[-1])) from None
    if frame.height != len(lines.line):
        raise unclosed_quote(path, int(lines.line[min(frame.height, len(lines.line)) - 1]))
    keep = lines.fields > 0
    keep[:first] = False
    line, fields = lines.line[keep], lines.fields[keep]
    frame = frame.filter(pl.Series(keep)).with_columns(pl.all().str.strip_chars().replace("", None))
    if not columns.allow_others:
        _check_encoding(path, frame, line)
    at_end = lines.open_end and max_rows is None

    def ragged_message(row: int) -> str:
        return _ragged_message(int(fields[row]), len(header), at_end and row == len(line) - 1)

    return Table(
        path, frame, line, ragged=np.flatnonzero(fields != len(header)), ragged_message=ragged_message
    )


def _check_encoding(path: Path, frame: pl.DataFrame, line: IntArray) -> None:
    """Raise if bytes that are not UTF-8 were read as replacement characters: they would change names."""
    for name in frame.columns:
        rows = frame[name].str.contains("\ufffd", literal=True).fill_null(False)
        if rows.any():
            where = int(line[int(rows.arg_max() or 0)])
            raise InputError(NOT_UTF8, file=str(path), line=where, field=name)


def _ragged_message(fields: int, expected: int, cut_off: bool) -> str:
    if cut_off and fields < expected:
        return f"the file is cut off here: its last line has {fields} of {expected} fields"
    return f"this line has {fields} fields, the header has {expected}"


def _read_parquet(path: Path, columns: Columns, what: str) -> Table:
    try:
        schema = pl.read_parquet_schema(path)
        check_header(list(schema), columns, path, line=None)
        for name, kind in schema.items():
            if name in columns.known and (kind.is_nested() or kind == pl.Binary):
                message = f"contains {kind.base_type()}, not one number or text per row"
                raise InputError(message, file=str(path), field=name)
        frame = pl.read_parquet(path)
    except (pl.exceptions.PolarsError, OSError) as error:
        first = str(error).splitlines()[0]
        raise InputError(
            f"cannot be read as a Parquet {what}; it may be cut off: {first}", file=str(path)
        ) from None
    return Table(path, frame, np.arange(1, frame.height + 1), has_lines=False)
