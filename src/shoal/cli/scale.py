"""`shoal scale JOB`: change its range of GPUs."""

from __future__ import annotations

import click

from shoal.cli.options import Connect, job_argument, output_option, server_options
from shoal.cli.out import Output
from shoal.cli.report import reported


@click.command()
@job_argument
@click.option("--min", "min_", type=int, help="Minimum number of GPUs.")
@click.option("--max", "max_", type=int, help="Maximum number of GPUs.")
@click.option("--pin", type=int, help="Exact number of GPUs.")
@output_option
@server_options
@reported
def scale(
    connect: Connect, job: str, min_: int | None, max_: int | None, pin: int | None, output: Output
) -> None:
    """Change a job's range of GPUs. The job may be running."""
    from shoal.cli.jobs_table import want
    from shoal.cli.of_array import one_job
    from shoal.cli.out import say
    from shoal.cli.report import print_document
    from shoal.core.errors import ShoalError

    if min_ is None and max_ is None and pin is None:
        raise ShoalError("give --min, --max or --pin")
    with connect() as client, one_job(client, job, "scale"):
        found = client.scale(job, min=min_, max=max_, pin=pin)
    if output.for_people:
        gpus = "GPU" if want(found) == "1" else "GPUs"
        say(f"{found.name}: may have {want(found)} {gpus}, has {found.gpus}")
    else:
        print_document(output, found, found.name)
