"""`shoal down`: end the control plane of this machine."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shoal.cli.options import home_option, yes_option

if TYPE_CHECKING:
    from shoal.server.api.models import Status


@click.command()
@click.option("--keep-jobs", is_flag=True, help="Let them train on; the next `shoal up` takes them over.")
@yes_option
@click.option("--timeout", default="60s", help="How long to wait until all has ended.")
@home_option
def down(keep_jobs: bool, yes: bool, timeout: str, home: Path | None) -> None:
    """End the control plane, and its jobs' processes unless they are to be kept.

    No job is lost: at the next `shoal up` those that use shoal.torch go on from where they were, others begin again.
    """
    from shoal.cli.out import say
    from shoal.cli.several import confirmed
    from shoal.cli.times import seconds
    from shoal.client import Client
    from shoal.client.connection import server_file
    from shoal.client.errors import NotRunning, Unreachable
    from shoal.server.home import default_home

    where = (home or default_home()).expanduser().absolute()
    limit_s = seconds(timeout)
    try:
        known = server_file(where)
    except NotRunning:
        say(f"no server runs on {where}")
        return
    try:
        with Client(known["address"], home=where) as client:
            status = client.status()
            if _busy(status) and not keep_jobs:
                confirmed(f"{_fate(status, keep_jobs=False)}. End it?", yes=yes)
            client.shutdown(keep_jobs=keep_jobs)
    except Unreachable:
        if not _alive(known):
            say(f"no server runs on {where}; the last one ended without saying so")
            return
        raise
    _await_end(known, where, limit_s)
    say("shoal is down" + (f"; {_fate(status, keep_jobs=keep_jobs)}" if _busy(status) else ""))


def _busy(status: Status) -> int:
    return sum(n for state, n in status.jobs.items() if state not in ("succeeded", "failed", "cancelled"))


def _fate(status: Status, *, keep_jobs: bool) -> str:
    """What becomes of the jobs that are not finished."""
    from shoal.core.words import counted

    running = sum(status.jobs.get(state, 0) for state in ("starting", "running"))
    jobs = f"{counted(_busy(status), 'unfinished job')} ({running} running)"
    if keep_jobs:
        return f"{jobs}: what runs runs on, and the next `shoal up` takes it over"
    return (
        f"{jobs}: what runs is stopped and begins again at the next `shoal up`, "
        "jobs that use shoal.torch from where they are"
    )


def _alive(known: dict[str, Any]) -> bool:
    """Whether the very process that wrote the file is still there: a pid alone may be another's by now."""
    from shoal.server.home import start_time

    started = start_time(int(known["pid"]))
    return started is not None and started == known["start_time"]


def _await_end(known: dict[str, Any], home: Path, limit_s: float) -> None:
    from shoal.client.errors import TimedOut

    deadline = time.monotonic() + limit_s
    while _alive(known):
        if time.monotonic() > deadline:
            raise TimedOut(
                f"the server (pid {known['pid']}) still ends after {limit_s:g} s; see {home}/server.log"
            )
        time.sleep(0.05)
