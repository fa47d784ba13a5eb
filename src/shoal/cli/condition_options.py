"""Options of `shoal run` besides GPUs that say when a job may run, and how many there are."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import click

from shoal.core.errors import ShoalError

F = TypeVar("F", bound=Callable[..., Any])

_OPTIONS = [
    click.option("--priority", type=int, help="Order among your own jobs: higher starts first. Default: 0."),
    click.option(
        "-l", "--label", "labels", multiple=True, help="Word to find the job by: key=value. Repeat for more."
    ),
    click.option(
        "--after",
        multiple=True,
        help="Start after this job, or all jobs of this array, succeeded; JOB:failure or JOB:any for other ends.",
    ),
    click.option(
        "--not-before",
        help="Do not start before: 2h (from now), or a time: 2026-01-31T08:00, in local time unless it has a zone.",
    ),
    click.option(
        "--deadline",
        help="When you need it: 8h (from now), or a time, as above. `shoal why` says if it is met.",
    ),
    click.option("--time-limit", help="End the job after this long with GPUs: 2h."),
    click.option("--warn", help="Signal before the time limit: USR1, or USR1@5m. Default time: 1m."),
    click.option("--array", help="Submit many jobs: 0-99, or 0-99%8 to run 8 of them at once."),
]


def condition_options(command: F) -> F:
    """Add the options; the command gets them as keyword arguments for `conditions`."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def conditions(
    priority: int | None,
    labels: Sequence[str],
    after: Sequence[str],
    not_before: str | None,
    deadline: str | None,
    time_limit: str | None,
    warn: str | None,
    array: str | None,
) -> dict[str, Any]:
    """The fields of the job that these options give; None where they are not given."""
    from shoal.cli.times import seconds, to_come

    signal, _, warn_time = (warn or "").partition("@")
    return {
        "priority": priority,
        "labels": pairs(labels, "--label") or None,
        "after": [_after(word) for word in after] or None,
        "not_before": to_come(not_before),
        "deadline": to_come(deadline),
        "time_limit_s": seconds(time_limit) if time_limit else None,
        "warn_signal": signal.upper().removeprefix("SIG") or None,
        "warn_s": seconds(warn_time) if warn_time else None,
        "array": array,
    }


def pairs(given: Sequence[str], option: str) -> dict[str, str]:
    """`key=value`, several times."""
    found = {}
    for word in given:
        key, equals, value = word.partition("=")
        if not equals or not key:
            raise ShoalError(f"{option} {word}: write key=value")
        found[key] = value
    return found


def _after(word: str) -> dict[str, str]:
    job, _, on = word.partition(":")
    if on and not re.fullmatch("success|failure|any", on):
        raise ShoalError(f"--after {word}: after the colon write success, failure or any")
    return {"job": job, "on": on or "success"}
