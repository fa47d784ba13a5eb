"""`shoal events`: what happened to jobs, and who did it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from shoal.cli.options import job_names, on_server, output_option
from shoal.cli.out import Output

if TYPE_CHECKING:
    from shoal.client import Client
    from shoal.server.api.models import Event


@click.command()
@click.argument(
    "what",
    required=False,
    metavar="[JOB|user/NAME]",
    shell_complete=job_names,
    help="Events of one job, or of one user.",
)
@click.option("-w", "--watch", is_flag=True, help="Print new events as they happen.")
@click.option("--type", "type_", help="Only types with this prefix: job., worker.lost, ...")
@click.option("--since", help="Events since: 10m (ago), or a time.")
@click.option(
    "-n", "--tail", type=click.IntRange(min=1), default=50, help="Print at most this many, the last ones."
)
@output_option
@on_server
def events(
    client: Client,
    output: Output,
    what: str | None,
    watch: bool,
    type_: str | None,
    since: str | None,
    tail: int,
) -> None:
    """List what happened to the jobs that you may see, and who did it. This is also the audit log."""
    from shoal.cli.of_array import one_job
    from shoal.cli.report import print_document
    from shoal.cli.times import since as point
    from shoal.server.api.models import EventList

    begin = point(since)
    which: dict[str, Any] = {"type": type_, "since": begin, "tail": None if begin else tail}
    if what is not None and what.startswith("user/"):
        which["user"] = what.removeprefix("user/")
    elif what is not None:
        with one_job(client, what, "events"):
            which["job"] = client.job(what).id
    if watch:
        _watch(client, output, which)
        return
    found = client.events(**which)
    if output.for_people:
        for event in found:
            print(story_line(event))
    else:
        last = str(found[-1].id) if found else None
        print_document(output, EventList(items=found, next=last), [str(e.id) for e in found])


def _watch(client: Client, output: Output, which: dict[str, Any]) -> None:
    from shoal.cli.report import plain, print_lines

    try:
        for seen in client.watch_events(**which):
            if output.for_people:
                print(story_line(seen), flush=True)
            elif output is Output.NAME:
                print(seen.id, flush=True)
            else:
                print_lines([plain(seen)])
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def story_line(event: Event) -> str:
    """One event with its id and its causes: the id of an earlier event, the number of a decision."""
    from shoal.cli.times import clock

    causes = [f"by #{event.cause}"] if event.cause is not None else []
    causes += [f"decision {event.plan}"] if event.plan is not None else []
    because = f"  ({', '.join(causes)})" if causes else ""
    job = event.job_name or ("-" if event.job is None else str(event.job))
    who = f"{event.type:<18} {event.actor:<10} {job:<14}"
    return f"{clock(event.at)}  #{event.id:<6} {who} {event.message}{because}"
