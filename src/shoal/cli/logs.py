"""`shoal logs JOB`: what its workers wrote."""

from __future__ import annotations

from typing import Annotated

import typer

from shoal.cli.options import Home, JobArg, Out, Output, Server, TokenFile
from shoal.cli.report import reported


@reported
def logs(
    job: JobArg,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on until the job is over.")] = False,
    rank: Annotated[str, typer.Option(help="One rank, or all.")] = "all",
    attempt: Annotated[
        int | None, typer.Option(min=0, help="One attempt: 0, and 1 after the first restart.")
    ] = None,
    tail: Annotated[int | None, typer.Option(min=0, help="Only the last so many lines.")] = None,
    since: Annotated[str | None, typer.Option(help="Written since: 10m, or a time.")] = None,
    timestamps: Annotated[bool, typer.Option("--timestamps", help="With the time of each line.")] = False,
    output: Out = Output.TABLE,
    home: Home = None,
    server: Server = None,
    token_file: TokenFile = None,
) -> None:
    """The output of a job's workers, merged, over resizes and restarts, with the rank in front.

    With -f it ends when the job ends, with its result: 0 succeeded, 100 failed, 103 cancelled.
    """
    from shoal.cli.follow import Terminated, detach, detachable, ending, exit_code, print_log
    from shoal.cli.options import connect
    from shoal.cli.out import say
    from shoal.cli.report import plain, print_document, print_lines
    from shoal.cli.times import since as point
    from shoal.server.api.models import LogPage

    which = {"rank": _rank(rank), "attempt": attempt, "tail": tail, "since": point(since)}
    with connect(home, server, token_file) as client:
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
            raise typer.Exit(detach(found, why)) from None
    if output.for_people:
        say(ending(found))
    raise typer.Exit(exit_code(found))


def _rank(text: str) -> int | None:
    from shoal.core.errors import ShoalError

    if text == "all":
        return None
    if not text.isdigit() or int(text) > 1_000_000:
        raise ShoalError(f"--rank {text}: write a number, or all")
    return int(text)
