"""`shoal cancel JOB...`."""

from __future__ import annotations

from typing import Annotated

import typer

from shoal.cli.options import Home, JobArgs, Out, Output, Server, TokenFile, Yes
from shoal.cli.report import reported


@reported
def cancel(
    jobs: JobArgs,
    yes: Yes = False,
    grace: Annotated[str | None, typer.Option(help="Time to end by itself: 60s. Default: the job's.")] = None,
    output: Out = Output.TABLE,
    home: Home = None,
    server: Server = None,
    token_file: TokenFile = None,
) -> None:
    """Cancel jobs, in whatever state they are."""
    from shoal.cli.options import connect
    from shoal.cli.several import confirmed, each
    from shoal.cli.times import seconds

    grace_s = None if grace is None else seconds(grace)
    with connect(home, server, token_file) as client:
        if output.for_people:
            confirmed(f"Cancel {', '.join(jobs)}?", yes=yes)
        each(jobs, lambda job: client.cancel(job, grace_s=grace_s), "cancelled", output)
