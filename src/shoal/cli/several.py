"""Act on several jobs and report each result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import click

from shoal.cli.out import Output

if TYPE_CHECKING:
    from shoal.server.api.models import Job


def each(names: Sequence[str], act: Callable[[str], Job], done: str, output: Output) -> None:
    """Act on each job. A failure is reported and does not stop the others."""
    from shoal.cli.out import say
    from shoal.cli.report import print_document
    from shoal.core.errors import ShoalError
    from shoal.server.api.models import JobList

    found: list[Job] = []
    errors: list[ShoalError] = []
    for name in names:
        try:
            found.append(act(name))
        except ShoalError as error:
            errors.append(error)
    if output.for_people:
        for job in found:
            say(f"{job.name}: {done}" + (f" ({job.state.value})" if job.state.value != done else ""))
    elif found or not errors:
        print_document(output, JobList(items=found, next=None), [job.name for job in found])
    for earlier in errors[:-1]:
        say(f"shoal: {earlier}")
    if errors:
        raise errors[-1]


def confirmed(question: str, *, yes: bool) -> None:
    """Ask on a terminal, and exit unless the answer is yes. Without a terminal, do not ask."""
    import sys

    if not yes and sys.stdin.isatty() and sys.stderr.isatty() and not click.confirm(question, err=True):
        raise SystemExit(0)
