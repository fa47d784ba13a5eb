"""Comparing the signatures of two workers: one line per parameter, optimizer group, and so on."""

from __future__ import annotations


def first_difference(
    expected: tuple[str, ...], found: tuple[str, ...], one: str = "the job", other: str = "this worker"
) -> str | None:
    """Describe the first line in which two signatures differ. Return None if they are equal."""
    for want, have in zip(expected, found):
        if want != have:
            return f"{one} has {want!r}, {other} has {have!r}"
    if len(found) > len(expected):
        return f"{other} has {found[len(expected)]!r}, {one} has nothing there"
    if len(found) < len(expected):
        return f"{one} has {expected[len(found)]!r}, {other} has nothing there"
    return None
