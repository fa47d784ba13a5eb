"""The answer "unknown, because ...".

What is learned from measurements is often not known yet, or cannot be known from what there is. Such an
answer is a value that carries its reason; it is never an exception and never a guess passed off as knowledge.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Unknown:
    """Not known, and why: one clause that can be shown to a person."""

    why: str

    def __str__(self) -> str:
        return f"unknown, because {self.why}"
