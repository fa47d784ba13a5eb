"""The answer "unknown, because ...".

What is learned from measurements is often not known yet, or cannot be derived from the data. Such an answer
is a value with its reason: not an exception, and never a guess presented as knowledge.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Unknown:
    """An unknown value, and why: one clause that can be shown to a user."""

    why: str

    def __str__(self) -> str:
        return f"unknown, because {self.why}"
