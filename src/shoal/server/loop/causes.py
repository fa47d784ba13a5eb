"""What led to a plan, as plain data for the events of the jobs that it changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shoal.core.events import Event, Measured, Timer

#: Causes that an event names at most.
MOST_NAMED = 5


def causes_of(taken: Sequence[tuple[Event, int | None]]) -> list[dict[str, Any]]:
    """The events of a cycle: their kind, their job or node, and the id of the store's event that records them.

    Measurements and timers come last: they lead to a change only if nothing else happened.
    """
    often = (Measured, Timer)
    ordered = sorted(taken, key=lambda pair: isinstance(pair[0], often))
    return [_cause(event, recorded_as) for event, recorded_as in ordered[:MOST_NAMED]]


def _cause(event: Event, recorded_as: int | None) -> dict[str, Any]:
    found: dict[str, Any] = {"kind": type(event).__name__}
    for key, field in (("job", "job_id"), ("node", "node"), ("user", "user")):
        value = getattr(event, field, None)
        found |= {} if value is None else {key: value}
    return found if recorded_as is None else found | {"event": recorded_as}
