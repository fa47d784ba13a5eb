"""Reading a worker's output from the files that its keeper writes.

A position is an offset in bytes from the beginning of the whole output, including files that were rotated away.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Line:
    at_s: float
    text: str
    #: The position after the line.
    end: int


def segments(directory: Path) -> list[tuple[int, Path]]:
    """The log files as (position of the first byte, file), oldest first."""
    try:
        names = [p for p in directory.iterdir() if p.name.startswith("log.") and p.name[4:].isdigit()]
    except OSError:
        return []
    return sorted((int(p.name[4:]), p) for p in names)


def read_lines(directory: Path, begin: int, max_bytes: int = 256 * 1024) -> list[Line]:
    """Read whole lines from position `begin` on. Output that was rotated away is skipped."""
    found: list[Line] = []
    for start, path in segments(directory):
        try:
            size = path.stat().st_size
            if start + size <= begin:
                continue
            with path.open("rb") as file:
                at = max(begin, start)
                file.seek(at - start)
                data = file.read(max_bytes)
        except OSError:  # rotated away meanwhile
            continue
        whole = data[: data.rfind(b"\n") + 1]
        for raw in whole.splitlines(keepends=True):
            at += len(raw)
            found.append(_line(raw, at))
        max_bytes -= len(whole)
        begin = at
        if max_bytes <= 0 or len(whole) < len(data):
            break
    return found


def tail_position(directory: Path, lines: int) -> int:
    """The position where the last `lines` lines begin."""
    if lines <= 0:
        return end_position(directory)
    for start, path in reversed(segments(directory)):
        try:
            data = path.read_bytes()
        except OSError:
            continue
        count = data.count(b"\n")
        if count >= lines:
            position = len(data)
            for _ in range(lines + 1):
                position = data.rfind(b"\n", 0, position)
                if position < 0:
                    break
            return start + position + 1
        lines -= count
    found = segments(directory)
    return found[0][0] if found else 0


def end_position(directory: Path) -> int:
    found = segments(directory)
    if not found:
        return 0
    start, path = found[-1]
    try:
        return start + path.stat().st_size
    except OSError:
        return start


def _line(raw: bytes, end: int) -> Line:
    stamp, _, text = raw.rstrip(b"\n").partition(b" ")
    try:
        at_s = datetime.strptime(stamp.decode(), "%Y-%m-%dT%H:%M:%S.%fZ").replace(tzinfo=UTC).timestamp()
    except ValueError:
        at_s, text = 0.0, raw.rstrip(b"\n")
    return Line(at_s, text.decode(errors="replace"), end)
