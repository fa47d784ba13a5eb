"""`shoal logs JOB`: the output of its workers."""

from __future__ import annotations

import click

from shoal.cli.options import Connect, job_argument, output_option, server_options
from shoal.cli.out import Output
from shoal.cli.report import reported


@click.command()
@job_argument
@click.option("-f", "--follow", is_flag=True, help="Print new lines until the job ends.")
@click.option("--rank", default="all", help="Only this rank, or all.")
@click.option(
    "--attempt", type=click.IntRange(min=0), help="Only this attempt: 0, or 1 after the first restart."
)
@click.option("--tail", type=click.IntRange(min=0), help="Only this many lines, the last ones.")
@click.option("--since", help="Lines since: 10m (ago), or a time.")
@click.option("--timestamps", is_flag=True, help="Print the time of each line.")
@output_option
@server_options
@reported
def logs(
    connect: Connect,
    job: str,
    follow: bool,
    rank: str,
    attempt: int | None,
    tail: int | None,
    since: str | None,
    timestamps: bool,
    output: Output,
) -> None:
    """Print the output of a job's workers: merged by time, across resizes and restarts, with the rank in front.

    With -f the command ends with the job. Exit codes: 0 succeeded, 100 failed, 103 cancelled.
    """
    from shoal.cli.follow import Terminated, detach, detachable, ending, exit_code, print_log
    from shoal.cli.out import say
    from shoal.cli.report import plain, print_document, print_lines
    from shoal.cli.times import since as point
    from shoal.server.api.models import LogPage

    which = {"rank": _rank(rank), "attempt": attempt, "tail": tail, "since": point(since)}
    with connect() as client:
        found = client.job(job)
        if not follow:
            lines = client.logs(found.id, **which)  # type: ignore[arg-type]
            if output.for_people:
                print_log(lines, many=found.max_gpus > 1, timestamps=timestamps)
            else:
                page = LogPage(items=lines, next=None)
                print_document(output, page, [line.text for line in lines])
            return
        try:
            with detachable():
                stream = client.follow_logs(found.id, **which)  # type: ignore[arg-type]
                if output.for_people or output is Output.NAME:
                    print_log(stream, many=found.max_gpus > 1, timestamps=timestamps)
                else:
                    print_lines(plain(line) for line in stream)
                found = client.job(found.id)
        except (KeyboardInterrupt, Terminated) as why:
            raise SystemExit(detach(found, why)) from None
    if output.for_people:
        say(ending(found))
    raise SystemExit(exit_code(found))


def _rank(text: str) -> int | None:
    from shoal.core.errors import ShoalError

    if text == "all":
        return None
    if not text.isdigit() or int(text) > 1_000_000:
        raise ShoalError(f"--rank {text}: write a number, or all")
    return int(text)
