"""Errors that a user can act on: one line that says what is wrong, where, and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ShoalError(ValueError):
    """Invalid input from the user. The message is one line and names the remedy."""


class RunLost(ShoalError):
    """A process ended unexpectedly. The input of the user was valid."""

    exit_code = 1


class InputError(ShoalError):
    """Invalid input with its location: file, line and field, if known."""

    def __init__(
        self, message: str, *, file: str | None = None, line: int | None = None, field: str | None = None
    ):
        self.message = message
        self.file = file
        self.line = line
        self.field = field
        where = ":".join(str(part) for part in (file, line) if part is not None)
        prefix = f"{where}: " if where else ""
        column = f"{field}: " if field else ""
        super().__init__(f"{prefix}{column}{message}")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A suggestion for an error about an unknown word: the closest known word, or all of them."""
    choices = sorted(known)
    folded = {choice.lower(): choice for choice in choices}
    near = difflib.get_close_matches(word.lower(), folded, n=1, cutoff=0.55)
    if near:
        return f"did you mean {folded[near[0]]!r}?"
    return f"known: {', '.join(choices)}"
