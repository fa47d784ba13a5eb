"""`shoal submit`: submit a job file, and follow the job."""

from __future__ import annotations

import sys
import uuid
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import click

from shoal.cli.options import Connect, output_option, server_options, yes_option
from shoal.cli.out import Output
from shoal.cli.report import reported
from shoal.cli.spec_options import file_option, name_option, set_option

if TYPE_CHECKING:
    from shoal.client import Client
    from shoal.server.api.models import JobSpec


@click.command()
@file_option
@name_option
@set_option
@click.option("-d", "--detach", is_flag=True, help="Submit the job and return.")
@click.option("--idempotency-key", help="A second submission with the same key creates no second job.")
@yes_option
@output_option
@server_options
@reported
def submit(
    connect: Connect,
    file: str,
    name: str | None,
    settings: tuple[str, ...],
    detach: bool,
    idempotency_key: str | None,
    yes: bool,
    output: Output,
) -> None:
    """Submit a job file: show the plan and ask, then follow the job and exit with its result.

    Without a terminal nothing is asked. Ctrl-C detaches; the job continues.

    Exit codes: 0 succeeded, 100 failed, 103 cancelled; 7 if the file or the server refuses it.
    """
    from shoal.cli.out import say
    from shoal.cli.plan import describe
    from shoal.cli.spec_options import from_file
    from shoal.client.jobfile import at_its_place
    from shoal.core.errors import ShoalError

    if file == "-" and not yes:
        raise ShoalError("a job file from standard input needs -y: no question can be asked then")
    spec, document = from_file(file, settings, name)
    with connect() as client, at_its_place(document):
        if not yes and output.for_people and sys.stdin.isatty() and sys.stderr.isatty():
            alone = {"array": None, "sweep": None, "max_running": None}
            say(describe(client.plan(spec.model_copy(update=alone))))
            if not click.confirm("Submit it?", default=True, err=True):
                raise SystemExit(0)
        raise SystemExit(hand_in(client, spec, detach=detach, output=output, key=idempotency_key))


def hand_in(client: Client, spec: JobSpec, *, detach: bool, output: Output, key: str | None = None) -> int:
    """Submit and, unless detached, follow the job. The key makes a retry after a lost answer safe."""
    from shoal.cli import follow
    from shoal.cli.out import say
    from shoal.cli.report import print_document
    from shoal.cli.times import clock
    from shoal.core.words import data_size

    if spec.upload and spec.tree is None:
        sent = client.upload(spec.workdir)
        spec = spec.model_copy(update={"tree": sent.digest})
        if output.for_people:
            say(
                f"uploaded {spec.workdir} ({data_size(sent.size_bytes)}); what .gitignore excludes stays here"
            )
    if output.for_people and spec.not_before is not None and spec.not_before <= datetime.now(UTC):
        say(f"not_before is in the past ({clock(spec.not_before)} local time), so it does not delay the job")
    if spec.array is not None or spec.sweep is not None:
        return _hand_in_array(client, spec, output, key)
    job = client.submit(spec, idempotency_key=key or uuid.uuid4().hex)
    if output.for_people:
        if detach:
            print(job.name, flush=True)
        say(f"submitted as job {job.id}" if detach else f"submitted {job.name} (job {job.id})")
        if spec.gpus == "auto":
            for event in client.events(job=job.id, type="job.sized"):
                say(event.message)
        if not detach:
            return follow.stay(client, job)
        say(f"watch it: shoal logs -f {job.name}   why it waits: shoal why {job.name}")
        return 0
    code = 0
    if not detach:
        try:
            with follow.detachable():
                job = client.wait(job.id)
        except (KeyboardInterrupt, follow.Terminated) as why:
            return follow.detach(job, why)
        code = follow.exit_code(job)
    print_document(output, job, job.name)
    return code


def _hand_in_array(client: Client, spec: JobSpec, output: Output, key: str | None) -> int:
    """Submit an array or a sweep. Nobody can follow many jobs at once, so this returns at once."""
    from shoal.cli.out import say
    from shoal.cli.report import print_document

    array = client.submit_array(spec, idempotency_key=key or uuid.uuid4().hex)
    if output.for_people:
        print(array.name, flush=True)
        say(f"submitted as {array.tasks} jobs ({array.first} to {array.last})")
        say(f"list them: shoal ps --array {array.name}   cancel them: shoal cancel {array.name}")
    else:
        print_document(output, array, array.name)
    return 0
