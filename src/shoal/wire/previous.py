"""The protocol before the present one: workers that an earlier version of Shoal started still speak it.

The control plane listens for them on the port that they know. It asks them for one thing only, to save their state and
leave; workers of the present version then continue from it. A challenge carries one protocol number, so a port speaks
one protocol.
"""

from __future__ import annotations

from typing import Any

PREVIOUS_PROTOCOL = 3
CHECKPOINT_VERSION = 3
READABLE_CHECKPOINTS = frozenset({3})
"""Versions of saved states that this version continues from: its own and those before it."""

_ORDER = frozenset(
    {"type", "seq", "dead", "plan", "commit", "board", "signed", "first", "checkpoint", "stop"}
)
_PLAN = frozenset(
    {
        *("number", "kind", "members", "previous", "holders", "addresses", "resume", "restore", "save"),
        *("learners", "replaces"),
    }
)


def for_previous(raw: dict[str, Any]) -> dict[str, Any]:
    """An order without the fields that a worker of the previous protocol does not know: it refuses them."""
    if raw["type"] != "Order":
        return raw
    kept = {key: value for key, value in raw.items() if key in _ORDER}
    if kept["plan"] is not None:
        kept["plan"] = {key: value for key, value in kept["plan"].items() if key in _PLAN}
    return kept
