"""The file in which an engine announces that it takes the machine back (see `engines/base.py`)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

CHECK_S = 1.0


async def watch_leaving_file(
    path: Path, leaving: Callable[[float, str], None], now_s: Callable[[], float]
) -> None:
    """Call `leaving` with the seconds that are left whenever the file has a new deadline.

    `now_s` is CLOCK_BOOTTIME, by which the deadline counts.
    """
    told: float | None = None
    while True:
        deadline_s = _read(path)
        if deadline_s is not None and deadline_s != told:
            told = deadline_s
            leaving(max(deadline_s - now_s(), 0.0), "the engine takes the machine back")
        await asyncio.sleep(CHECK_S)


def _read(path: Path) -> float | None:
    try:
        return float(path.read_text())
    except (OSError, ValueError):
        return None
