"""Arrays and sweeps in a job file: which tasks there are, and what each has in place of names."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

SweepValue = str | int | float | bool
MAX_SWEEP_KEYS = 16
#: Tasks that one submission may have.
MAX_TASKS = 10_000
_ARRAY = r"(\d{1,9})(?:-(\d{1,9}))?(?::([1-9]\d{0,8}))?"


@dataclass(frozen=True, slots=True)
class Task:
    """One job of an array or a sweep."""

    index: int
    values: Mapping[str, SweepValue]

    def fill(self, text: str) -> str:
        """The text with this task's values in place of `{name}`. Other braces stay."""
        values = {"index": self.index, **self.values}
        return re.sub(r"\{([A-Za-z0-9._-]+)\}", lambda m: _shown(values, m), text)


def _shown(values: Mapping[str, SweepValue], match: re.Match[str]) -> str:
    value = values.get(match[1])
    if value is None:
        return match[0]
    return str(value).lower() if isinstance(value, bool) else str(value)


def check_tasks(
    array: str | None, sweep: Mapping[str, Sequence[SweepValue]] | None, max_running: int | None
) -> None:
    """Raise a ValueError that says what is wrong with an array or a sweep."""
    if array is not None and sweep is not None:
        raise ValueError("sweep: give either an array or a sweep")
    if array is None and sweep is None:
        if max_running is not None:
            raise ValueError("max_running: it is for an array or a sweep")
        return
    if array is not None:
        indices, at_once = _parsed(array)
        if at_once is not None and max_running is not None:
            raise ValueError("max_running: it is given in the array already")
        _check_count(len(indices), "array")
    if sweep is not None:
        if not sweep or not all(sweep.values()):
            raise ValueError("sweep: give at least one name with at least one value")
        if "index" in sweep:
            raise ValueError("sweep: the name index is that of the task's number; choose another")
        _check_count(math.prod(len(values) for values in sweep.values()), "sweep")


def tasks_of(array: str | None, sweep: Mapping[str, Sequence[SweepValue]] | None) -> list[Task]:
    """The tasks, in order. What is given was checked."""
    if sweep is not None:
        combined = itertools.product(*sweep.values())
        return [Task(i, dict(zip(sweep, values))) for i, values in enumerate(combined)]
    assert array is not None
    return [Task(i, {}) for i in _parsed(array)[0]]


def most_running(array: str | None, max_running: int | None) -> int | None:
    """How many tasks may run at once; None: all."""
    return max_running if array is None else _parsed(array)[1] or max_running


def _check_count(tasks: int, field: str) -> None:
    if tasks > MAX_TASKS:
        raise ValueError(f"{field}: {tasks:,} jobs are too many at once; submit at most {MAX_TASKS:,}")


def _parsed(text: str) -> tuple[Sequence[int], int | None]:
    """(the indices, how many run at once) of `0-9,20,30-40:5%8`."""
    body, percent, limit = text.replace(" ", "").partition("%")
    if percent and not re.fullmatch(r"[1-9]\d{0,5}", limit):
        raise ValueError(f"array: {limit!r} after % is not a number of jobs: write 0-99%8")
    found: list[range] = []
    for part in body.split(","):
        match = re.fullmatch(_ARRAY, part)
        if not match:
            raise ValueError(f"array: {text!r} is not an array: write 0-99, 0-99%8 or 1,3,7-9")
        low, high = int(match[1]), int(match[2] or match[1])
        if high < low:
            raise ValueError(f"array: {part} ends before it begins")
        found.append(range(low, high + 1, int(match[3] or 1)))
    _check_count(sum(map(len, found)), "array")
    return sorted({i for part in found for i in part}), int(limit) if percent else None
