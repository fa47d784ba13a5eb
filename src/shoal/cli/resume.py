"""`shoal resume JOB...`."""

from __future__ import annotations

from shoal.cli.options import Home, JobArgs, Out, Output, Server, TokenFile
from shoal.cli.report import reported


@reported
def resume(
    jobs: JobArgs,
    output: Out = Output.TABLE,
    home: Home = None,
    server: Server = None,
    token_file: TokenFile = None,
) -> None:
    """Let a paused job go on."""
    from shoal.cli.options import connect
    from shoal.cli.several import each

    with connect(home, server, token_file) as client:
        each(jobs, client.resume, "resumed", output)
