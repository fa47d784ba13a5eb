"""Agents that were refused: who asked from where, and why not. Whoever runs the cluster sees them for a while."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

MOST = 100
KEPT_S = 86400.0


@dataclass(frozen=True, slots=True)
class Refusal:
    #: What it called itself. Empty: not known. Nothing proves it.
    agent: str
    #: Of its machine. Empty: not known.
    address: str
    why: str
    #: The last time, by the control plane's wall clock.
    at_s: float


def shown(text: str) -> str:
    """What a stranger says, in one line and without what changes a terminal."""
    return "".join(c if c.isprintable() else "?" for c in text)


class Refusals:
    """One for each name and address: an agent that tries again and again is there once."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str], Refusal] = {}
        #: Receives each refusal, but not each repetition.
        self.on_refused: Callable[[Refusal], None] = lambda refusal: None

    def add(self, refusal: Refusal) -> bool:
        """Return whether it is no repetition."""
        key = (refusal.agent, refusal.address)
        before = self._found.pop(key, None)
        self._found[key] = refusal  # the latest is last
        if len(self._found) > MOST:
            del self._found[next(iter(self._found))]
        is_new = before is None or before.why != refusal.why
        if is_new:
            self.on_refused(refusal)
        return is_new

    def accepted(self, agent: str, address: str) -> None:
        """The agent has joined after all, or another one of its machine has."""
        self._found = {
            key: refusal
            for key, refusal in self._found.items()
            if refusal.agent != agent and (refusal.agent or refusal.address != address)
        }

    def recent(self, now_s: float) -> list[Refusal]:
        return [refusal for refusal in self._found.values() if now_s - refusal.at_s <= KEPT_S]
