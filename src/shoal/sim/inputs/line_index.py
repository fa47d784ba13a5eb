"""The line number and the number of fields of each record of a text table.

A csv reader fills short rows with nulls and counts rows, not lines. Users need the line that their editor shows,
and a row with missing fields is a truncated file, not a row of defaults. The structure is therefore scanned
separately from the values: with array operations if no field is quoted, else with the standard csv reader.
"""

from __future__ import annotations

import csv
import mmap
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shoal.core.errors import InputError

IntArray = NDArray[np.int64]

_BLOCK_BYTES = 16 << 20
#: Longest valid line. A reader would hold a longer one in memory several times.
LONGEST_LINE = 1 << 20
NEWLINE, RETURN = ord("\n"), ord("\r")


@dataclass(frozen=True)
class LineIndex:
    """One entry per record, including the header: its first line, and its number of fields (0: a blank line)."""

    line: IntArray
    fields: IntArray
    #: Whether the last line has no newline, as in a truncated file.
    open_end: bool


def scan_lines(
    path: Path, separator: str, max_records: int | None = None, *, quotes: bool = True
) -> LineIndex:
    """Line and number of fields of every record of a text table."""
    if path.stat().st_size == 0:
        return LineIndex(np.zeros(0, np.int64), np.zeros(0, np.int64), False)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        _check_length(path, data)
        open_end = data[len(data) - 1] != NEWLINE
        if max_records is None and (not quotes or data.find(b'"') < 0):
            return _scan_plain(data, ord(separator), open_end)
    return _scan_quoted(path, separator, max_records, open_end)


def _check_length(path: Path, data: mmap.mmap) -> None:
    """Raise for the first line that is too long.

    The search for a newline starts at the end of each block of that length, so that it reads little of the file.
    """
    start = 0
    while len(data) - start > LONGEST_LINE:
        end = data.rfind(b"\n", start, start + LONGEST_LINE + 1)
        if end < 0:
            message = f"this line is longer than {LONGEST_LINE:,} bytes; is this the right file?"
            raise InputError(message, file=str(path), line=_line_at(data, start))
        start = end + 1


def _line_at(data: mmap.mmap, byte: int) -> int:
    """The line number of a byte."""
    blocks = range(0, byte, _BLOCK_BYTES)
    return 1 + sum(data[start : min(start + _BLOCK_BYTES, byte)].count(b"\n") for start in blocks)


def _scan_plain(data: mmap.mmap, separator: int, open_end: bool) -> LineIndex:
    """Scan a file without quoted fields: every newline ends a record."""
    counts: list[IntArray] = []
    start = 0
    while start < len(data):
        end = min(start + _BLOCK_BYTES, len(data))
        if end < len(data):
            cut = data.rfind(b"\n", start, end)
            if cut < 0:
                cut = data.find(b"\n", end)
            end = cut + 1 if cut >= 0 else len(data)
        block = np.frombuffer(data[start:end], np.uint8)
        counts.append(_fields_of_block(block, separator))
        start = end
    fields = np.concatenate(counts)
    return LineIndex(np.arange(1, len(fields) + 1), fields, open_end)


def _fields_of_block(block: NDArray[np.uint8], separator: int) -> IntArray:
    ends = np.flatnonzero(block == NEWLINE)
    if block[-1] != NEWLINE:
        ends = np.append(ends, len(block))
    starts = np.concatenate(([0], ends[:-1] + 1))
    separators = np.flatnonzero(block == separator)
    fields = np.diff(np.searchsorted(separators, ends), prepend=0) + 1
    width = ends - starts
    lone_return = (width == 1) & (block[np.minimum(starts, len(block) - 1)] == RETURN)
    fields[(width == 0) | lone_return] = 0
    return fields.astype(np.int64)


def _scan_quoted(path: Path, separator: str, max_records: int | None, open_end: bool) -> LineIndex:
    """Scan a file with quoted fields, which may contain separators and newlines, with the csv reader."""
    line: list[int] = []
    fields: list[int] = []
    with path.open(newline="\n", encoding="utf-8-sig", errors="replace") as file:
        reader = csv.reader(file, delimiter=separator)
        begins = 1
        try:
            for record in reader:
                line.append(begins)
                fields.append(len(record))
                begins = reader.line_num + 1
                if max_records is not None and len(line) >= max_records:
                    break
        except csv.Error as error:
            if "new-line" in str(error):
                message = "this line contains a lone carriage return; end lines with a newline"
                raise InputError(message, file=str(path), line=begins) from None
            # An extremely long field: an unclosed quote has swallowed the lines that follow.
            raise unclosed_quote(path, begins) from None
    return LineIndex(np.array(line, np.int64), np.array(fields, np.int64), open_end)


def unclosed_quote(path: Path, line: int) -> InputError:
    """The error about a quoted field that is not closed."""
    message = "a quoted field is not closed: a quotation mark is missing, or the file is cut off"
    return InputError(message, file=str(path), line=line)
