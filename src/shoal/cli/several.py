"""Act on several jobs and report each result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import click

from shoal.cli.out import Output
from shoal.core.errors import ShoalError

if TYPE_CHECKING:
    from shoal.server.api.models import Array, Job


def each(
    names: Sequence[str],
    act: Callable[[str], Job],
    done: str,
    output: Output,
    act_on_array: Callable[[str], Array] | None = None,
) -> None:
    """Act on each job, or on all jobs of an array. A failure is reported and does not stop the others."""
    from shoal.cli.of_array import states
    from shoal.cli.out import say
    from shoal.cli.report import plain, print_document, print_lines
    from shoal.server.api.models import JobList

    found: list[Job] = []
    arrays: list[Array] = []
    errors: list[ShoalError] = []
    for name in names:
        try:
            found.append(act(name))
        except ShoalError as error:
            array = _of_array(name, error, act_on_array, errors)
            arrays += [] if array is None else [array]
    if output.for_people:
        for job in found:
            say(f"{job.name}: {done}" + (f" ({job.state.value})" if job.state.value != done else ""))
        for each_ in arrays:
            say(f"{each_.name}: {done} ({states(each_)})")
    elif arrays and not found:
        print_lines([plain(each_) for each_ in arrays])
    elif found or not errors:
        print_document(output, JobList(items=found, next=None), [job.name for job in found])
    for earlier in errors[:-1]:
        say(f"shoal: {earlier}")
    if errors:
        raise errors[-1]


def _of_array(
    name: str, error: ShoalError, act: Callable[[str], Array] | None, errors: list[ShoalError]
) -> Array | None:
    """Act on the array of this name, if there is no such job. Otherwise note the error.

    A number is always that of a job, never that of an array.
    """
    if act is not None and not name.isdigit() and getattr(error, "code", None) == "not_found":
        try:
            return act(name)
        except ShoalError as other:
            error = other if getattr(other, "code", None) != "not_found" else error
    errors.append(error)
    return None


def confirmed(question: str, *, yes: bool) -> None:
    """Ask on a terminal, and exit unless the answer is yes. Without a terminal, do not ask."""
    import sys

    if not yes and sys.stdin.isatty() and sys.stderr.isatty() and not click.confirm(question, err=True):
        raise SystemExit(0)
