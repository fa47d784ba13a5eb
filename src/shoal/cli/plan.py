"""`shoal plan`: what would happen if a job were submitted now."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from shoal.cli.options import Connect, output_option, server_options
from shoal.cli.out import Output
from shoal.cli.report import reported
from shoal.cli.spec_options import file_option, name_option, set_option

if TYPE_CHECKING:
    from shoal.server.api.models import PlanOutcome

EXIT_CODES = {"starts": 0, "waits": 10, "shrinks_others": 11, "infeasible": 12}


@click.command()
@file_option
@name_option
@set_option
@output_option
@server_options
@reported
def plan(connect: Connect, file: str, name: str | None, settings: tuple[str, ...], output: Output) -> None:
    """Show what would happen if this job were submitted now. Changes nothing.

    Exit codes: 0 the job would start now, 10 it would wait, 11 it would shrink other jobs, 12 it can never run here.
    """
    from shoal.cli.report import print_document
    from shoal.cli.spec_options import from_file
    from shoal.client.jobfile import at_its_place

    spec, document = from_file(file, settings, name)
    with connect() as client, at_its_place(document):
        outcome = client.plan(spec)
    if output.for_people:
        print(describe(outcome))
    else:
        print_document(output, outcome, outcome.verdict)
    raise SystemExit(EXIT_CODES[outcome.verdict])


def describe(outcome: PlanOutcome) -> str:
    """The verdict in a sentence, then the changes of other jobs."""
    lines = [outcome.sentence]
    for change in outcome.changes:
        name = change.job.name or f"a job of {change.job.user}"
        lines.append(f"  {name}: {change.from_gpus} → {change.to_gpus} GPUs")
    return "\n".join(lines)
