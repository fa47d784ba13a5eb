"""`shoal down`: stop the control plane of this machine."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from shoal.cli.options import home_option, yes_option

if TYPE_CHECKING:
    from shoal.server.api.models import Status
    from shoal.server.home import Running


@click.command()
@click.option("--keep-jobs", is_flag=True, help="Leave the jobs running; the next `shoal up` adopts them.")
@yes_option
@click.option("--timeout", default="60s", help="How long to wait until the server has stopped.")
@home_option
def down(keep_jobs: bool, yes: bool, timeout: str, home: Path | None) -> None:
    """Stop the control plane and, without --keep-jobs, the processes of its jobs.

    No job is lost: after the next `shoal up`, jobs that use shoal.torch continue from their state and others restart.
    """
    from shoal.cli.out import say
    from shoal.cli.several import confirmed
    from shoal.cli.times import seconds
    from shoal.client import Client
    from shoal.client.connection import server_of
    from shoal.client.errors import NotRunning, Unreachable
    from shoal.server.home import Home, MachinesLeft, default_home

    where = (home or default_home()).expanduser().absolute()
    limit_s = seconds(timeout)
    try:
        known = server_of(where)
    except NotRunning:
        say(f"no server runs on {where}")
        return
    try:
        with Client(known.address, home=where) as client:
            status = client.status()
            if _busy(status) and not keep_jobs:
                confirmed(f"{_fate(status, keep_jobs=False)}. Stop the server?", yes=yes)
            client.shutdown(keep_jobs=keep_jobs)
    except Unreachable:
        if not known.alive:
            say(f"no server runs on {where}; the last one ended unexpectedly")
            return
        raise
    _await_end(known, where, limit_s)
    if not keep_jobs and (left := Home(where).not_returned()):
        raise MachinesLeft(
            f"shoal is down, but it could not return all machines ({left}); `shoal up` takes them over again"
        )
    say("shoal is down" + (f"; {_fate(status, keep_jobs=keep_jobs)}" if _busy(status) else ""))


def _busy(status: Status) -> int:
    return sum(n for state, n in status.jobs.items() if state not in ("succeeded", "failed", "cancelled"))


def _fate(status: Status, *, keep_jobs: bool) -> str:
    """What happens to the jobs that are not finished."""
    from shoal.core.words import counted

    running = sum(status.jobs.get(state, 0) for state in ("starting", "running"))
    jobs = f"{counted(_busy(status), 'unfinished job')} ({running} running)"
    if keep_jobs:
        return f"{jobs}: running jobs continue, and the next `shoal up` adopts them"
    return (
        f"{jobs}: running jobs stop and restart at the next `shoal up`; "
        "jobs that use shoal.torch continue from their state"
    )


def _await_end(known: Running, home: Path, limit_s: float) -> None:
    from shoal.client.errors import TimedOut

    deadline = time.monotonic() + limit_s
    while known.alive:
        if time.monotonic() > deadline:
            raise TimedOut(
                f"the server (pid {known.pid}) has not stopped after {limit_s:g} s; see {home}/server.log"
            )
        time.sleep(0.05)
