"""Options that set limits of a user or a group, and how limits are shown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click

from shoal.core.errors import ShoalError

if TYPE_CHECKING:
    from shoal.server.api.models import Limits, LimitsUse

F = TypeVar("F", bound=Callable[..., Any])

_OPTIONS = [
    click.option("--max-gpus", help="GPUs at once; none for no limit."),
    click.option(
        "--max-gpus-of-type",
        multiple=True,
        help="GPUs of a type at once: v100=4. v100=none removes one, none all of them. Repeat for more.",
    ),
    click.option("--max-running", help="Jobs with GPUs at once; none for no limit."),
    click.option("--max-waiting", help="Unfinished jobs without GPUs; none for no limit."),
    click.option("--gpu-hours", help="GPU hours per week, from Monday 00:00 UTC; none for no limit."),
]


def limit_options(command: F) -> F:
    """Add the options; the command gets them as keyword arguments for `given_limits`."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def given_limits(
    max_gpus: str | None,
    max_gpus_of_type: Sequence[str],
    max_running: str | None,
    max_waiting: str | None,
    gpu_hours: str | None,
) -> dict[str, Any] | None:
    """The limits that the options give; None in place of a number removes one. None if none is given."""
    found: dict[str, Any] = {}
    for name, option, text in (
        ("max_gpus", "--max-gpus", max_gpus),
        ("max_running_jobs", "--max-running", max_running),
        ("max_waiting_jobs", "--max-waiting", max_waiting),
        ("gpu_hours_per_week", "--gpu-hours", gpu_hours),
    ):
        if text is not None:
            found[name] = None if text == "none" else _number(text, option, whole=option != "--gpu-hours")
    if max_gpus_of_type:
        found["max_gpus_of_type"] = None if "none" in max_gpus_of_type else _types(max_gpus_of_type)
    return found or None


def _types(given: Sequence[str]) -> dict[str, float | None]:
    found: dict[str, float | None] = {}
    for word in [part for text in given for part in text.split(",")]:
        gpu_type, equals, value = word.partition("=")
        if not equals:
            raise ShoalError(f"--max-gpus-of-type {word}: write TYPE=number, such as v100=4")
        found[gpu_type] = None if value == "none" else _number(value, "--max-gpus-of-type", whole=True)
    return found


def _number(text: str, option: str, *, whole: bool) -> float:
    try:
        return int(text) if whole else float(text)
    except ValueError:
        raise ShoalError(f"{option} {text}: write a {'whole ' if whole else ''}number, or none") from None


def shown(limits: Limits, use: LimitsUse) -> str:
    """The limits that are set, each with its use: `GPUs 2/8, GPU hours 12.5/500`."""
    parts: list[tuple[str, float | None, float]] = [
        ("GPUs", limits.max_gpus, use.gpus),
        ("running", limits.max_running_jobs, use.running_jobs),
        ("waiting", limits.max_waiting_jobs, use.waiting_jobs),
        ("GPU hours", limits.gpu_hours_per_week, round(use.gpu_hours_of_week, 1)),
    ]
    of_type = limits.max_gpus_of_type or {}
    parts += [(word, most, use.gpus_of_type.get(word, 0)) for word, most in of_type.items()]
    return ", ".join(f"{what} {now:g}/{most:g}" for what, most, now in parts if most is not None) or "-"
