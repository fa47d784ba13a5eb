"""`shoal wait JOB`: wait until it runs, has a given size, or ends."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

import click

from shoal.cli.options import Connect, job_argument, output_option, server_options
from shoal.cli.out import Output
from shoal.cli.report import reported

if TYPE_CHECKING:
    from shoal.client import Client
    from shoal.server.api.models import Array, Job


@click.command()
@job_argument
@click.option("--for", "until", default="done", help="What to wait for: done, running, paused, or size=N.")
@click.option("--timeout", help="Give up after: 30s, 2h. Exit code 124.")
@output_option
@server_options
@reported
def wait(connect: Connect, job: str, until: str, timeout: str | None, output: Output) -> None:
    """Wait for a job. Exit codes: 0 succeeded (or the condition holds), 100 failed, 103 cancelled, 124 timeout.

    101: the job ended, and the condition can no longer hold.

    For the name of an array: wait until all its jobs are over. Exit codes: 0 all succeeded, 100 one failed, 103 one was
    cancelled and none failed.
    """
    from shoal.cli.follow import NOT_FINISHED, Terminated, detach, detachable, ending, exit_code
    from shoal.cli.of_array import job_or_array
    from shoal.cli.out import say
    from shoal.cli.report import print_document
    from shoal.cli.times import seconds
    from shoal.core.words import counted
    from shoal.server.api.models import Array

    wished = _condition(until)
    limit_s = seconds(timeout) if timeout is not None else None
    with connect() as client:
        found = job_or_array(client, job)
        if isinstance(found, Array):
            raise SystemExit(_wait_for_all(client, found, until, limit_s, output))
        try:
            with detachable():
                found = client.wait(found.id, wished, timeout_s=limit_s)
        except (KeyboardInterrupt, Terminated) as why:
            raise SystemExit(detach(found, why)) from None
    if output.for_people:
        say(
            ending(found)
            if found.state.is_final
            else f"{found.name}: {found.state.value}, {counted(found.gpus, 'GPU')}"
        )
    else:
        print_document(output, found, found.name)
    if until != "done" and wished(found):
        raise SystemExit(0)
    code = exit_code(found)
    raise SystemExit(NOT_FINISHED if until != "done" and code == 0 else code)


def _wait_for_all(client: Client, array: Array, until: str, limit_s: float | None, output: Output) -> int:
    """Wait until all jobs of an array are over; return the exit code."""
    from shoal.cli.follow import CANCELLED, FAILED, INTERRUPTED, TERMINATED, Terminated, detachable
    from shoal.cli.of_array import states
    from shoal.cli.out import say
    from shoal.cli.report import print_document
    from shoal.core.errors import ShoalError

    if until != "done":
        raise ShoalError(f"--for {until}: {array.name} is an array; wait for one of its jobs, or for `done`")
    try:
        with detachable():
            array = client.wait_array(array.id, timeout_s=limit_s)
    except (KeyboardInterrupt, Terminated) as why:
        say(f"\ndetached; {array.name} continues. List its jobs: shoal ps --array {array.name}")
        return TERMINATED if isinstance(why, Terminated) else INTERRUPTED
    if output.for_people:
        say(f"{array.name}: {states(array)}")
    else:
        print_document(output, array, array.name)
    return FAILED if array.jobs.get("failed") else CANCELLED if array.jobs.get("cancelled") else 0


def _condition(text: str) -> Callable[[Job], bool]:
    from shoal.core.errors import ShoalError

    size = re.fullmatch(r"size=(\d{1,7})", text)
    if size:
        gpus = int(size[1])
        # Count active workers, not GPUs: on some of its GPUs workers may still prepare.
        return lambda job: sum(worker.state == "active" for worker in job.workers) == gpus
    if text == "done":
        return lambda job: job.state.is_final
    if text in ("running", "paused", "pending", "starting"):
        return lambda job: job.state.value == text
    raise ShoalError(f"--for {text}: write done, running, paused, or size=8")
