"""Whether a job will be done by its deadline, as far as can be said."""

from __future__ import annotations

from shoal.core.words import spoken
from shoal.server.api import models as m


def verdict(left_s: float, starts_in: m.Estimate | None, remaining: m.Estimate) -> str:
    """One sentence. `left_s`: until the deadline; `starts_in`: None if it runs; `remaining`: how long it needs yet."""
    when = f"in {spoken(left_s)}" if left_s > 0 else f"{spoken(-left_s)} ago"
    deadline = f"its deadline is {when}" if left_s > 0 else f"its deadline was {when}"
    if left_s <= 0:
        return f"{deadline}: it is late"
    if remaining.low_s is None or remaining.high_s is None:
        return f"{deadline}; whether it will be met is not known: {remaining.unknown or 'its length is not known'}"
    low_s, high_s = remaining.low_s, remaining.high_s
    if starts_in is not None:
        if starts_in.low_s is None or starts_in.high_s is None:
            if low_s > left_s:
                return f"{deadline}, and it needs {_range(low_s, high_s)} once it runs: it will be late"
            why = starts_in.unknown or "when it starts is not known"
            return f"{deadline}, and it needs {_range(low_s, high_s)} once it runs: {why}"
        low_s, high_s = low_s + starts_in.low_s, high_s + starts_in.high_s
    ends = f"{deadline}, and it will be done in {_range(low_s, high_s)}"
    if high_s <= left_s:
        return f"{ends}: it will be met"
    if low_s > left_s:
        return f"{ends}: it will be missed by {spoken(low_s - left_s)} or more"
    return f"{ends}: it may be missed"


def _range(low_s: float, high_s: float) -> str:
    low, high = spoken(low_s), spoken(high_s)
    return low if low == high else f"{low} to {high}"
