"""Errors that a person can act on: one line that says what is wrong, where, and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ShoalError(ValueError):
    """Something the user gave cannot be used. The message is one line and names the remedy."""


class RunLost(ShoalError):
    """Something ended that nobody asked to end; nothing was wrong with what the user gave."""

    exit_code = 1


class InputError(ShoalError):
    """Bad input, with the place where it stands: file, line and field where they are known."""

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
    """A suggestion to append to an error about an unknown word, or what is known if nothing is near."""
    choices = sorted(known)
    folded = {choice.lower(): choice for choice in choices}
    near = difflib.get_close_matches(word.lower(), folded, n=1, cutoff=0.55)
    if near:
        return f"did you mean {folded[near[0]]!r}?"
    return f"known: {', '.join(choices)}"
