"""`shoal logs JOB`: the output of its workers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from shoal.cli.options import Connect, job_argument, output_option, server_options
from shoal.cli.out import Output
from shoal.cli.report import reported

if TYPE_CHECKING:
    from shoal.client import Client
    from shoal.server.api.models import Job


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
    from shoal.cli.of_array import one_job
    from shoal.cli.out import say
    from shoal.cli.report import plain, print_document, print_lines
    from shoal.cli.times import since as point
    from shoal.server.api.models import LogPage

    which: dict[str, Any] = {
        "rank": _rank(rank),
        "attempt": attempt,
        "tail": tail,
        "since": point(since),
    }
    with connect() as client:
        with one_job(client, job, "logs"):
            found = client.job(job)
        _check_rank(client, found, which["rank"], follow=follow)
        if not follow:
            lines = client.logs(found.id, **which)
            if output.for_people:
                print_log(lines, many=found.max_gpus > 1, timestamps=timestamps)
            else:
                page = LogPage(items=lines, next=None)
                print_document(output, page, [line.text for line in lines])
            return
        try:
            with detachable():
                stream = client.follow_logs(found.id, **which)
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


def _check_rank(client: Client, job: Job, rank: int | None, *, follow: bool) -> None:
    """Refuse a rank that no worker of the job has or had, and that none can get while it is followed."""
    from shoal.core.errors import ShoalError

    ranks = sorted({worker.rank for worker in job.workers if worker.rank is not None})
    may_come = not job.state.is_final and (follow or not ranks)
    if rank is None or rank in ranks or (may_come and rank < job.max_gpus):
        return
    if client.logs(job.id, rank=rank, tail=1):  # of an early worker: a job lists its newest ones only
        return
    if ranks:
        told = f"{job.name} has {_ranks(ranks)}"
    elif job.state.is_final:
        told = f"{job.name} had no workers with a rank"
    else:
        told = f"{job.name} has no workers yet, and can get {_ranks(list(range(job.max_gpus)))}"
    raise ShoalError(f"--rank {rank}: {told}")


def _ranks(ranks: list[int]) -> str:
    """`rank 0 only`, `ranks 0 to 7`, `ranks 0, 2, 5`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]} only"
    if ranks == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return f"ranks {', '.join(map(str, ranks))}"
