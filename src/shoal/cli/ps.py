"""`shoal ps`: the jobs."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import click

from shoal.cli.options import Connect, output_option, server_options
from shoal.cli.out import Output
from shoal.cli.report import reported

if TYPE_CHECKING:
    from shoal.client import Client
    from shoal.server.api.models import Array, Job

    #: Finds an array by its number; None: arrays are not shown as one line.
    ArrayOf = Callable[[int], Array] | None

#: Interval between updates of a live table: progress and ages change without an event.
REFRESH_S = 1.0


@click.command()
@click.option("-a", "--all", "all_", is_flag=True, help="Include finished jobs.")
@click.option("-w", "--watch", is_flag=True, help="Keep the table up to date until Ctrl-C.")
@click.option("-u", "--user", help="Only jobs of this user.")
@click.option("--mine", is_flag=True, help="Only your own jobs.")
@click.option("-s", "--state", help="Only jobs in these states: pending,running,...")
@click.option("--since", help="Only jobs submitted since: 2h (ago), or a time.")
@click.option("-l", "--label", "labels", multiple=True, help="Only jobs with this label: key=value.")
@click.option("--array", help="Only jobs of this array, one line each, also the finished ones.")
@click.option("--expand", is_flag=True, help="One line for every job of an array.")
@click.option("-n", "number", type=click.IntRange(min=1), help="At most this many, the newest.")
@output_option
@server_options
@reported
def ps(
    connect: Connect,
    all_: bool,
    watch: bool,
    user: str | None,
    mine: bool,
    state: str | None,
    since: str | None,
    labels: tuple[str, ...],
    array: str | None,
    expand: bool,
    number: int | None,
    output: Output,
) -> None:
    """List the unfinished jobs that you may see, each with the reason why it has no more GPUs.

    -a, -s and --array also list finished jobs.
    """
    from shoal.cli.condition_options import pairs
    from shoal.cli.times import since as point

    states = _states(state)
    with connect() as client:
        whose = client.status().user if mine else user

        def jobs() -> list[Job]:
            active = None if all_ or states or array else True
            return client.jobs(
                states=states, active=active, user=whose, since=point(since), limit=number,
                labels=pairs(labels, "--label"), array=array,
            )  # fmt: skip

        array_of = None if expand or array else client.array
        if watch:
            _watch(client, jobs, output, array_of)
        else:
            found = jobs()
            if user is not None and not found:
                _must_exist(client, user)
            _print(found, output, array_of, hint=not all_ and not states and not array)


def _must_exist(client: Client, user: str) -> None:
    from shoal.client.errors import NotFound, WrongInput

    try:
        client.user(user)
    except (NotFound, WrongInput):  # no user can have such a name
        raise NotFound(
            f"there is no user {user!r} that you may see; `shoal user ls` lists them", code="not_found"
        ) from None


def _states(text: str | None) -> list[str] | None:
    from shoal.core.errors import ShoalError, did_you_mean
    from shoal.server.api.models import JobState

    states = [part.strip() for part in text.split(",") if part.strip()] if text else None
    for state in states or []:
        if state not in set(JobState):
            raise ShoalError(
                f"-s {state}: there is no such state; {did_you_mean(state, [s.value for s in JobState])}"
            )
    return states


def _print(jobs: list[Job], output: Output, array_of: ArrayOf, *, hint: bool) -> None:
    from shoal.cli.out import say
    from shoal.cli.report import print_document
    from shoal.server.api.models import JobList

    if not output.for_people:
        print_document(output, JobList(items=jobs, next=None), [job.name for job in jobs])
    elif jobs:
        print("\n".join(_lines(jobs, output, array_of)))
    else:
        say("no unfinished jobs; shoal ps -a lists the finished ones" if hint else "no such jobs")


def _lines(jobs: list[Job], output: Output, array_of: ArrayOf) -> list[str]:
    from shoal.cli import array_lines
    from shoal.cli import jobs_table as t
    from shoal.cli.columns import COLOURS, colour_on, lines, table_width

    wide = output is Output.WIDE
    if array_of is not None and not wide:
        rows = array_lines.rows(jobs, array_of)
    else:
        rows = [t.wide_row(job) if wide else t.row(job) for job in jobs]
    colours = COLOURS if colour_on() else None
    head, spare = (t.WIDE_HEAD, []) if wide else (t.HEAD, t.SPARE)
    return lines(head, rows, width=table_width(wide=wide), colours=colours, spare=spare)


def _watch(client: Client, jobs: Callable[[], list[Job]], output: Output, array_of: ArrayOf) -> None:
    """Update the table in place on a terminal; elsewhere print a line for every job that changes. Ctrl-C ends it."""
    try:
        if output.for_people and sys.stdout.isatty():
            _watch_live(jobs, output, array_of)
        else:
            _watch_plain(client, jobs, output)
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def _watch_live(jobs: Callable[[], list[Job]], output: Output, array_of: ArrayOf) -> None:
    from rich.live import Live
    from rich.text import Text

    with Live(auto_refresh=False, screen=False) as live:
        while True:
            live.update(Text.from_ansi("\n".join(_lines(jobs(), output, array_of))), refresh=True)
            time.sleep(REFRESH_S)


def _watch_plain(client: Client, jobs: Callable[[], list[Job]], output: Output) -> None:
    """Print a line whenever a job's state, size or reason changes."""
    from shoal.cli.report import plain, print_lines

    shown: dict[int, object] = {}
    while True:
        now = {job.id: job for job in reversed(jobs())}
        now |= {i: client.job(i) for i in shown if i not in now}
        for job in now.values():
            key = (job.state, job.gpus, job.target_gpus, job.reason and job.reason.code)
            if shown.get(job.id) == key:
                continue
            shown[job.id] = key
            if output.for_people:
                print(_plain_line(job), flush=True)
            elif output is Output.NAME:
                print(job.name, flush=True)
            else:
                print_lines([plain(job)])
            if job.state.is_final:
                shown.pop(job.id)
        time.sleep(REFRESH_S)


def _plain_line(job: Job) -> str:
    from datetime import UTC, datetime

    from shoal.cli.jobs_table import row
    from shoal.cli.times import clock

    return "  ".join([clock(datetime.now(UTC)), *(cell for cell in row(job) if cell)])
