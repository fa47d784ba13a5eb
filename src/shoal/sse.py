"""Server-sent events, read line by line (the part of the format that the server uses)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Message:
    """One event: its name, its data, and the id after which to resume."""

    event: str
    data: str
    id: str | None


def read_messages(lines: Iterable[str]) -> Iterator[Message | None]:
    """Messages as they are complete; None for a comment, which only says that the line is alive."""
    event, last_id = "message", None
    data: list[str] = []
    for line in lines:
        if not line:
            if data:
                yield Message(event, "\n".join(data), last_id)
            event, data, last_id = "message", [], None
            continue
        if line.startswith(":"):
            yield None
            continue
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if field == "data":
            data.append(value)
        elif field == "event":
            event = value
        elif field == "id":
            last_id = value
