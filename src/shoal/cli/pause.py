"""`shoal pause JOB...`."""

from __future__ import annotations

from shoal.cli.options import Home, JobArgs, Out, Output, Server, TokenFile
from shoal.cli.report import reported


@reported
def pause(
    jobs: JobArgs,
    output: Out = Output.TABLE,
    home: Home = None,
    server: Server = None,
    token_file: TokenFile = None,
) -> None:
    """Hold a job back: it gives up its GPUs and keeps its state."""
    from shoal.cli.options import connect
    from shoal.cli.several import each

    with connect(home, server, token_file) as client:
        each(jobs, client.pause, "paused", output)
