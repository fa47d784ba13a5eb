"""`shoal scale JOB`: another range of GPUs for a job."""

from __future__ import annotations

from typing import Annotated

import typer

from shoal.cli.options import Home, JobArg, Out, Output, Server, TokenFile
from shoal.cli.report import reported


@reported
def scale(
    job: JobArg,
    min_: Annotated[int | None, typer.Option("--min", help="At least so many GPUs.")] = None,
    max_: Annotated[int | None, typer.Option("--max", help="At most so many GPUs.")] = None,
    pin: Annotated[int | None, typer.Option("--pin", help="Exactly so many GPUs.")] = None,
    output: Out = Output.TABLE,
    home: Home = None,
    server: Server = None,
    token_file: TokenFile = None,
) -> None:
    """Change a job's range of GPUs, also while it runs."""
    from shoal.cli.jobs_table import want
    from shoal.cli.options import connect
    from shoal.cli.out import say
    from shoal.cli.report import print_document
    from shoal.core.errors import ShoalError

    if min_ is None and max_ is None and pin is None:
        raise ShoalError("give --min, --max or --pin")
    with connect(home, server, token_file) as client:
        found = client.scale(job, min=min_, max=max_, pin=pin)
    if output.for_people:
        gpus = "GPU" if want(found) == "1" else "GPUs"
        say(f"{found.name}: may have {want(found)} {gpus}, has {found.gpus}")
    else:
        print_document(output, found, found.name)
