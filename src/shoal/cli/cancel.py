"""`shoal cancel JOB...`."""

from __future__ import annotations

import click

from shoal.cli.options import Connect, jobs_argument, output_option, server_options, yes_option
from shoal.cli.out import Output
from shoal.cli.report import reported


@click.command()
@jobs_argument
@yes_option
@click.option("--grace", help="Time that the workers have to stop: 60s. Default: the job's own.")
@output_option
@server_options
@reported
def cancel(connect: Connect, jobs: tuple[str, ...], yes: bool, grace: str | None, output: Output) -> None:
    """Cancel jobs in any state, or all jobs of an array."""
    from shoal.cli.several import confirmed, each
    from shoal.cli.times import seconds

    grace_s = None if grace is None else seconds(grace)
    with connect() as client:
        if output.for_people:
            confirmed(f"Cancel {', '.join(jobs)}?", yes=yes)
        each(
            jobs,
            lambda job: client.cancel(job, grace_s=grace_s),
            "cancelled",
            output,
            lambda array: client.change_array(array, "cancel", grace_s=grace_s),
        )
