"""`shoal events`: what happened."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from shoal.cli.options import Home, Out, Output, Server, TokenFile, job_names
from shoal.cli.report import reported

if TYPE_CHECKING:
    from shoal.server.models import Event


@reported
def events(
    job: Annotated[
        str | None, typer.Argument(metavar="[JOB]", help="Of one job only.", autocompletion=job_names)
    ] = None,
    watch: Annotated[bool, typer.Option("-w", "--watch", help="Go on as they happen.")] = False,
    type_: Annotated[str | None, typer.Option("--type", help="Only these: job., worker.lost, ...")] = None,
    since: Annotated[str | None, typer.Option(help="Since: 10m, or a time.")] = None,
    tail: Annotated[int, typer.Option("-n", "--tail", min=1, help="At most so many, the last.")] = 50,
    output: Out = Output.TABLE,
    home: Home = None,
    server: Server = None,
    token_file: TokenFile = None,
) -> None:
    """What happened to the jobs you may see, and who did it. This is also the audit log."""
    from shoal.cli.options import connect
    from shoal.cli.report import plain, print_document, print_lines
    from shoal.cli.times import since as point
    from shoal.server.models import EventList

    with connect(home, server, token_file) as client:
        number = client.job(job).id if job else None
        begin = point(since)
        kept = None if begin else tail
        if not watch:
            found = client.events(job=number, type=type_, since=begin, tail=kept)
            if output.for_people:
                for event in found:
                    print(_line(event))
            else:
                last = str(found[-1].id) if found else None
                print_document(output, EventList(items=found, next=last), [str(e.id) for e in found])
            return
        try:
            for seen in client.watch_events(job=number, type=type_, since=begin, tail=kept):
                if seen is None:
                    continue
                if output.for_people:
                    print(_line(seen), flush=True)
                elif output is Output.NAME:
                    print(seen.id, flush=True)
                else:
                    print_lines([plain(seen)])
        except KeyboardInterrupt:
            raise typer.Exit(130) from None


def _line(event: Event) -> str:
    from shoal.cli.times import clock

    return f"{clock(event.at)}  {event.type:<18} {event.actor:<10} {event.message}"
