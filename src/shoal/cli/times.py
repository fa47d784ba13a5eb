"""Parse and print durations and points in time."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

from shoal.core.errors import ShoalError

UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}


def seconds(text: str) -> float:
    """`90`, `90s`, `2h`, `1h30m`."""
    parts = re.findall(r"(\d+(?:\.\d+)?)(ms|[smhdw])", text)
    if re.fullmatch(r"\d+(\.\d+)?", text):
        found = float(text)
    elif parts and "".join(n + u for n, u in parts) == text:
        found = sum(float(number) * UNITS_S[unit] for number, unit in parts)
    else:
        raise ShoalError(f"{text!r} is not a duration: write 90s, 15m, 2h or 1h30m")
    if found > 1e9:
        raise ShoalError(f"{text!r} is too long a duration")
    return found


def since(text: str | None) -> datetime | None:
    """`2h` (ago), or a time such as 2026-01-31T12:00:00Z."""
    if text is None:
        return None
    if re.match(r"\d{4}-", text):
        try:
            found = datetime.fromisoformat(text)
        except ValueError:
            raise ShoalError(
                f"{text!r} is not a time: write 2026-01-31T12:00:00Z, or 2h for 2 hours ago"
            ) from None
        return found if found.tzinfo else found.astimezone()
    return datetime.now(UTC) - timedelta(seconds=seconds(text))


def to_come(text: str | None) -> datetime | None:
    """`2h` (from now), or a time such as 2026-01-31T12:00:00Z."""
    if text is None or re.match(r"\d{4}-", text):
        return since(text)
    return datetime.now(UTC) + timedelta(seconds=seconds(text))


def ago(then: datetime | None, now: datetime | None = None) -> str:
    """`18m`, `2h`, `3d`: one unit, for a column."""
    if then is None:
        return "-"
    passed_s = max(((now or datetime.now(UTC)) - then).total_seconds(), 0.0)
    for unit in ("d", "h", "m"):
        if passed_s >= UNITS_S[unit]:
            return f"{int(passed_s // UNITS_S[unit])}{unit}"
    return f"{int(passed_s)}s"


def clock(then: datetime) -> str:
    """Local time of day, with the date if that is not today."""
    local = then.astimezone()
    today = local.date() == datetime.now().astimezone().date()
    return local.strftime("%H:%M:%S" if today else "%Y-%m-%d %H:%M:%S")
