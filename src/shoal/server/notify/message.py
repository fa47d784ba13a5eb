"""What notifications say: which events they are about, as JSON and in the format of Slack."""

from __future__ import annotations

from typing import Any, Literal

from shoal.server.loop.clock import as_time
from shoal.server.store.change import Row

Kind = Literal["started", "resized", "preempted", "failed", "finished", "idle"]
#: The types of events that each kind is about.
TYPES: dict[str, tuple[str, ...]] = {
    "started": ("job.running",),
    "resized": ("job.resized",),
    "preempted": ("job.preempted",),
    "failed": ("job.failed", "job.restarted"),
    "finished": ("job.succeeded", "job.cancelled"),
    "idle": ("job.idle",),
}
KINDS = tuple(TYPES)
_SIGN = {"failed": ":x:", "finished": ":white_check_mark:", "idle": ":zzz:", "preempted": ":pause_button:"}


def types_of(kinds: list[str]) -> list[str]:
    return [type_ for kind in kinds for type_ in TYPES.get(kind, ())]


def kind_of(type_: str) -> str:
    return next((kind for kind, types in TYPES.items() if type_ in types), "test")


def message(format_: str, event: Row, name: str | None) -> dict[str, Any]:
    """The body of a notification about an event of the job with this name."""
    kind = kind_of(event["type"])
    text = f"{name}: {event['message']}" if name else event["message"]
    if format_ == "slack":
        return {"text": f"{_SIGN.get(kind, ':arrow_forward:')} *{_escaped(kind)}* {_escaped(text)}"}
    at = as_time(event["at_s"])
    return {
        "event": kind,
        "id": event["id"],
        "type": event["type"],
        "at": at.isoformat(),
        "user": event["user"],
        "job": {"id": event["job"], "name": name},
        "message": event["message"],
        "text": text,
    }


def _escaped(text: str) -> str:
    """Slack reads `<...>` as links and mentions."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
