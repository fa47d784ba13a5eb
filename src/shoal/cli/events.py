"""`shoal events`: what happened."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from shoal.cli.on_server import on_server
from shoal.cli.options import Output, job_names

if TYPE_CHECKING:
    from shoal.client import Client
    from shoal.server.api.models import Event


@on_server
def events(
    client: Client,
    output: Output,
    what: Annotated[
        str | None,
        typer.Argument(
            metavar="[JOB|user/NAME]", help="Of one job, or of one user.", autocompletion=job_names
        ),
    ] = None,
    watch: Annotated[bool, typer.Option("-w", "--watch", help="Go on as they happen.")] = False,
    type_: Annotated[str | None, typer.Option("--type", help="Only these: job., worker.lost, ...")] = None,
    since: Annotated[str | None, typer.Option(help="Since: 10m, or a time.")] = None,
    tail: Annotated[int, typer.Option("-n", "--tail", min=1, help="At most so many, the last.")] = 50,
) -> None:
    """What happened to the jobs you may see, and who did it. This is also the audit log."""
    from shoal.cli.report import print_document
    from shoal.cli.times import since as point
    from shoal.server.api.models import EventList

    begin = point(since)
    which: dict[str, Any] = {"type": type_, "since": begin, "tail": None if begin else tail}
    if what is not None and what.startswith("user/"):
        which["user"] = what.removeprefix("user/")
    elif what is not None:
        which["job"] = client.job(what).id
    if watch:
        _watch(client, output, which)
        return
    found = client.events(**which)
    if output.for_people:
        for event in found:
            print(_line(event))
    else:
        last = str(found[-1].id) if found else None
        print_document(output, EventList(items=found, next=last), [str(e.id) for e in found])


def _watch(client: Client, output: Output, which: dict[str, Any]) -> None:
    from shoal.cli.report import plain, print_lines

    try:
        for seen in client.watch_events(**which):
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
    """One event with its id and its causes: the id of an earlier event, the number of a decision."""
    from shoal.cli.times import clock

    causes = [f"by #{event.cause}"] if event.cause is not None else []
    causes += [f"decision {event.plan}"] if event.plan is not None else []
    because = f"  ({', '.join(causes)})" if causes else ""
    return f"{clock(event.at)}  #{event.id:<6} {event.type:<18} {event.actor:<10} {event.message}{because}"
