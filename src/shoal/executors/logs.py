"""Reading a worker's output from the files that its keeper writes.

A position is an offset in bytes from the beginning of the whole output, including files that were rotated away.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from pathlib import Path

from shoal.executors.keeper import LONGEST_LINE
from shoal.executors.keeper_files import clock_set_s
from shoal.wire.regular_file import open_regular, read_regular

STAMP = "%Y-%m-%dT%H:%M:%S.%fZ"
LONGEST_STAMP = 40
LONGEST_READ = 2 * LONGEST_LINE
SAME_CLOCK_S = 0.005
"""Clocks of two machines that differ by less are taken to be the same."""


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
    """Read whole lines from position `begin` on. In place of output that was dropped, a line says how much it was.

    Also a file whose last line has no end is read to its end if another file follows: that line gets no end any more.
    If this machine's clock was set while the keeper here stamped lines, their times are corrected.
    """
    lines = _read_lines(directory, begin, max_bytes)
    set_s = clock_set_s(directory)
    if not set_s:
        return lines
    return [replace(line, at_s=max(line.at_s + set_s, 0.0)) if line.at_s else line for line in lines]


def _read_lines(directory: Path, begin: int, max_bytes: int) -> list[Line]:
    lines: list[Line] = []
    found = segments(directory)
    for index, (start, path) in enumerate(found):
        try:
            stat = path.stat()
            if start + stat.st_size <= begin:
                continue
            with open_regular(path) as file:
                at = max(begin, start)
                file.seek(at - start)
                data = file.read(max_bytes)
        except OSError:  # rotated away meanwhile
            continue
        is_complete = index < len(found) - 1 and len(data) < max_bytes
        whole = data if is_complete else data[: data.rfind(b"\n") + 1]
        if at > begin and (whole or not stat.st_size):
            first_s = _line(whole.partition(b"\n")[0], at).at_s if whole else stat.st_mtime
            lines.append(Line(first_s, _dropped(at - begin), at))
        for raw in whole.splitlines(keepends=True):
            at += len(raw)
            lines.append(_line(raw, at))
        max_bytes -= len(whole)
        begin = at
        if max_bytes <= 0 or len(whole) < len(data):
            break
    return lines


def _dropped(size: int) -> str:
    words = (
        f"{size / 1e6:.1f} MB" if size >= 1e6 else f"{size / 1e3:.1f} kB" if size >= 1e3 else f"{size} bytes"
    )
    return f"[{words} of earlier output were dropped: only the newest files of a worker's output are kept]"


def tail_position(directory: Path, lines: int) -> int:
    """The position where the last `lines` lines begin."""
    if lines <= 0:
        return end_position(directory)
    for start, path in reversed(segments(directory)):
        try:
            data = read_regular(path)
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


def position_at(directory: Path, since_s: float) -> int:
    """The position of the first line that was printed at `since_s` or later. A worker's lines are in order of time."""
    since_s -= clock_set_s(directory)
    found = segments(directory)
    for start, path in reversed(found):
        try:
            first = _line_at(path, 0)
        except OSError:  # rotated away meanwhile
            continue
        if first is not None and first[1].at_s < since_s:
            return start + _bisect(path, since_s)
    return 0  # what was dropped may be later than that


def _bisect(path: Path, since_s: float) -> int:
    """The offset of the first line at `since_s` or later in a file whose first line is earlier."""
    low, high = 0, path.stat().st_size  # a line that is earlier begins at `low`; none does from `high` on
    while low < high:
        middle = (low + high) // 2
        found = _line_at(path, middle)
        if found is None or found[0] >= high:
            high = middle
        elif found[1].at_s < since_s:
            low = found[1].end
        else:
            high = found[0]
    return low


def _line_at(path: Path, offset: int) -> tuple[int, Line] | None:
    """(offset, line) of the first whole line that begins at `offset` or later. No keeper writes one that is longer."""
    with open_regular(path) as file:
        file.seek(max(offset - 1, 0))
        if offset > 0 and not file.readline(LONGEST_READ).endswith(b"\n"):
            return None
        begin = file.tell()
        raw = file.readline(LONGEST_READ)
        return (begin, _line(raw, file.tell())) if raw.endswith(b"\n") else None


def end_position(directory: Path) -> int:
    found = segments(directory)
    if not found:
        return 0
    start, path = found[-1]
    try:
        return start + path.stat().st_size
    except OSError:
        return start


def with_our_clock(data: bytes, ahead_s: float) -> bytes:
    """Whole lines as if a clock that is not `ahead_s` ahead had stamped them. Their positions stay the same."""
    if abs(ahead_s) < SAME_CLOCK_S:
        return data
    return b"".join(_restamped(raw, ahead_s) for raw in data.splitlines(keepends=True))


def _restamped(raw: bytes, ahead_s: float) -> bytes:
    stamp, space, text = raw.partition(b" ")
    return _moved(stamp, ahead_s) + space + text if len(stamp) < LONGEST_STAMP else raw


# Lines that were printed together have one stamp, so few stamps are parsed.


@lru_cache(maxsize=64)
def _moved(stamp: bytes, ahead_s: float) -> bytes:
    """The stamp of a time `ahead_s` earlier; what is no stamp stays as it is."""
    try:
        at = datetime.strptime(stamp.decode(), STAMP) - timedelta(seconds=ahead_s)
    except (ValueError, OverflowError):
        return stamp
    made = at.strftime(STAMP).encode()
    return made if len(made) == len(stamp) else stamp


@lru_cache(maxsize=64)
def _time_s(stamp: bytes) -> float | None:
    try:
        return datetime.strptime(stamp.decode(), STAMP).replace(tzinfo=UTC).timestamp()
    except ValueError:
        return None


def _line(raw: bytes, end: int) -> Line:
    stamp, _, text = raw.rstrip(b"\n").partition(b" ")
    at_s = _time_s(stamp) if len(stamp) < LONGEST_STAMP else None
    if at_s is None:
        at_s, text = 0.0, raw.rstrip(b"\n")
    return Line(at_s, text.decode(errors="replace"), end)
