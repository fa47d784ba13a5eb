"""`shoal doctor`: check this machine and the server."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from shoal.cli.options import Connect, output_option, server_options
from shoal.cli.out import Output
from shoal.cli.report import reported

if TYPE_CHECKING:
    from shoal.server.api.models import Check

#: With less free space, a busy cluster fills the disk within a day.
LOW_DISK_BYTES = 1 << 30


@click.command()
@output_option
@server_options
@reported
def doctor(connect: Connect, output: Output) -> None:
    """Check this machine and the server. Exit code 1 if a check fails, 0 if there are only warnings."""
    from shoal.cli.columns import print_table
    from shoal.cli.report import print_document
    from shoal.server.api.models import Doctor
    from shoal.server.home import default_home

    checks = {check.name: check for check in _local((connect.home or default_home()).expanduser())}
    checks |= {check.name: check for check in _of_server(connect)}
    found = Doctor(healthy=all(c.status != "error" for c in checks.values()), checks=list(checks.values()))
    if output.for_people:
        hints = [(c.name, c.hint) for c in found.checks if c.hint and c.status != "ok"]
        rows = [[c.name, c.status, c.message] for c in found.checks]
        print_table(["CHECK", "STATUS", ""], rows, wide=True)
        print("".join(f"\n{name}: {hint}" for name, hint in hints))
    else:
        print_document(output, found, [c.name for c in found.checks if c.status != "ok"])
    raise SystemExit(0 if found.healthy else 1)


def _local(home: Path) -> Iterator[Check]:
    from shoal.server.api.models import Check

    yield Check(name="python", status="ok", message=f"{sys.version.split()[0]} at {sys.executable}")
    if importlib.util.find_spec("torch"):
        yield Check(name="torch", status="ok", message="installed: elastic jobs can run")
    else:
        hint = "pip install 'shoal[torch]' in the environment of your jobs"
        yield Check(
            name="torch",
            status="warning",
            message="not installed: only jobs of a fixed size can run",
            hint=hint,
        )
    existing = next(p for p in (home, *home.parents) if p.exists())
    if not os.access(existing, os.W_OK):
        hint = "name a writable directory: --home or $SHOAL_HOME"
        yield Check(name="home", status="error", message=f"{home} is not writable", hint=hint)
    else:
        yield Check(name="home", status="ok", message=str(home))
        free = shutil.disk_usage(existing).free  # the server's own check replaces this one
        low = free < LOW_DISK_BYTES
        message = f"{free / 2**30:.1f} GiB free at {existing}"
        remedy = "free disk space for the store and the logs" if low else None
        yield Check(name="disk", status="warning" if low else "ok", message=message, hint=remedy)
    token = home / "admin.token"
    if token.exists() and token.stat().st_mode & 0o077:
        hint = f"chmod 600 {token}"
        yield Check(
            name="admin token", status="error", message="other users of this machine can read it", hint=hint
        )


def _of_server(connect: Connect) -> Iterator[Check]:
    from shoal.client.errors import ClientError
    from shoal.server.api.models import Check

    try:
        with connect(timeout_s=5.0) as client:
            status = client.status()
            message = f"{client.address}, version {status.version}"
            yield Check(name="server", status="ok", message=message)
            yield from client.doctor().checks
    except ClientError as error:
        yield Check(name="server", status="error", message=str(error), hint="shoal up")
