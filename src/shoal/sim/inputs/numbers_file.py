"""A file of numbers, one per line after an optional header, for `--option name=@FILE`."""

from __future__ import annotations

import math
from pathlib import Path

from shoal.core.errors import InputError
from shoal.sim.inputs.table import NOT_UTF8, check_text, printable, read_head

#: Some millions of numbers. A larger file was probably given by mistake.
MOST_BYTES = 64 << 20
_WHAT = "list of numbers"


def read_numbers(path: Path) -> list[float]:
    """Read the numbers of a file, each finite and not negative. Blank lines are skipped."""
    lines = [(at, text.strip()) for at, text in enumerate(_text(path).split("\n"), 1) if text.strip()]
    numbers = lines[1:] if lines and _is_header(lines[0][1]) else lines
    if not numbers:
        message = "there is no number in this file; write one number per line"
        raise InputError(message, file=str(path), line=lines[0][0] if lines else 1)
    return [_number(text, path, at) for at, text in numbers]


def _text(path: Path) -> str:
    check_text(read_head(path, _WHAT, "one number per line"), path, _WHAT)
    size = path.stat().st_size
    if size > MOST_BYTES:
        message = (
            f"is too large for a {_WHAT} ({size >> 20:,} MB); give a file of at most {MOST_BYTES >> 20} MB"
        )
        raise InputError(message, file=str(path), line=1)
    data = path.read_bytes()
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = 1 + data.count(b"\n", 0, error.start)
        raise InputError(NOT_UTF8, file=str(path), line=line) from None


def _is_header(text: str) -> bool:
    """Whether the first line is a name. A line such as `1,2` is an error, not a header."""
    try:
        float(text)
    except ValueError:
        return text[0].isalpha() or text[0] in "_\"'#"
    return False


def _number(text: str, path: Path, line: int) -> float:
    try:
        value = float(text)
    except ValueError:
        message = f"{_shown(text)} is not a number; write one number per line"
        raise InputError(message, file=str(path), line=line) from None
    if not 0 <= value < math.inf:
        message = f"must be finite and not negative, not {_shown(text)}; correct it, or remove it"
        raise InputError(message, file=str(path), line=line)
    return value


def _shown(text: str) -> str:
    return repr(printable(text[:40]))
