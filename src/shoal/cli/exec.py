"""`shoal exec JOB -- CMD`: run a command next to a worker of a running job."""

from __future__ import annotations

import click

from shoal.cli.options import Connect, job_argument, server_options
from shoal.cli.report import reported


@click.command("exec")
@job_argument
@click.argument("command", nargs=-1, required=True, metavar="-- CMD...", help="Program and arguments.")
@click.option("--rank", type=click.IntRange(min=0), help="Next to this rank. Default: the first.")
@click.option("-t", "--tty", is_flag=True, help="With this terminal, for shells and editors.")
@server_options
@reported
def exec_(connect: Connect, job: str, command: tuple[str, ...], rank: int | None, tty: bool) -> None:
    """Run a command next to a running job: on its machine, in its directory, with its GPUs, variables and account.

    The exit code is that of the command. Without -t, the command has no input.

    Examples:

      shoal exec train -- nvidia-smi

      shoal exec -t train -- bash
    """
    from shoal.cli.of_array import one_job
    from shoal.cli.terminal import attach

    with connect() as client:
        with one_job(client, job, "exec", state="running"):
            found = client.job(job)
        raise SystemExit(attach(client, found.id, command, rank=rank, tty=tty))
