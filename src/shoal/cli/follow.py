"""Follow a job: print its states until it runs, then its output; its result is the exit code."""

from __future__ import annotations

import contextlib
import shlex
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import TYPE_CHECKING

from shoal.cli.jobs_table import reason
from shoal.cli.out import duration, say

if TYPE_CHECKING:
    from shoal.client import Client
    from shoal.server.api.models import Job, LogLine

#: A waiting job's reason can change without an event: read it again after this time.
REFRESH_S = 15.0
#: New workers that print the same line within this time say the same.
ALIKE_S = 10.0
#: Exit codes.
FAILED, NOT_FINISHED, CANCELLED, INTERRUPTED, TERMINATED = 100, 101, 103, 130, 143


class Terminated(BaseException):
    """SIGTERM ended this command, not the job."""


@contextlib.contextmanager
def detachable() -> Iterator[None]:
    """Within this context SIGTERM detaches, as Ctrl-C does."""

    def end(*_: object) -> None:
        raise Terminated

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def exit_code(job: Job) -> int:
    """0 succeeded, 100 failed, 101 not finished, 103 cancelled."""
    return {"succeeded": 0, "failed": FAILED, "cancelled": CANCELLED}.get(job.state.value, NOT_FINISHED)


def stay(client: Client, job: Job) -> int:
    """Follow the job until it ends; return its exit code. Ctrl-C detaches and never cancels."""
    try:
        with detachable():
            job = show_states(client, job)
            print_log(client.follow_logs(job.id), many=job.max_gpus > 1)
            job = client.wait(job.id)
    except (KeyboardInterrupt, Terminated) as why:
        return detach(job, why)
    say(ending(job))
    return exit_code(job)


def detach(job: Job, why: BaseException) -> int:
    name = shlex.quote(job.name)
    say(f"\ndetached; {job.name} continues. Follow it: shoal logs -f {name}   Cancel it: shoal cancel {name}")
    return TERMINATED if isinstance(why, Terminated) else INTERRUPTED


def show_states(client: Client, job: Job) -> Job:
    """Print each state with its reason until the job runs or is over; in place on a terminal."""
    shown = ""
    cursor = client.status().last_event
    in_place = sys.stderr.isatty()
    while True:
        job = client.job(job.id)
        why = reason(job)
        text = f"{job.name}: {job.state.value}{f' ({why})' if why else ''}"
        if text != shown:
            line = f"\r\x1b[K{text}" if in_place else text
            print(line, end="" if in_place else "\n", file=sys.stderr, flush=True)
            shown = text
        if job.state.value == "running" or job.state.is_final:
            if in_place:
                print(file=sys.stderr)
            return job
        for event in client.watch_events(job=job.id, cursor=cursor, deadline=time.monotonic() + REFRESH_S):
            cursor = event.id
            break


def print_log(lines: Iterable[LogLine], *, many: bool, timestamps: bool = False) -> None:
    """Print log lines, with the rank in front if the job can have several workers."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")
    for line in once(lines):
        at = f"{stamp(line.at)} " if timestamps else ""
        rank = f"[{line.worker if line.rank is None else line.rank}] " if many else ""
        print(f"{at}{rank}{line.text}", flush=True)


def once(lines: Iterable[LogLine]) -> Iterator[LogLine]:
    """Leave out what several new workers print alike, as an error in the command's arguments.

    A worker without a rank has not joined its job yet. Its n-th line is left out if it is the n-th line of another
    such worker at about the same time.
    """
    printed: list[LogLine] = []
    counts: dict[str, int] = {}
    for line in lines:
        if line.rank is None:
            n = counts[line.worker] = counts.get(line.worker, -1) + 1
            if n < len(printed) and printed[n].worker != line.worker:
                apart_s = abs((line.at - printed[n].at).total_seconds())
                if printed[n].text == line.text and apart_s < ALIKE_S:
                    continue
            printed[n:] = [line]
        yield line


def stamp(at: datetime) -> str:
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def ending(job: Job) -> str:
    """One line about how the job ended."""
    how = f": {job.message}" if job.message and job.state.value != "succeeded" else ""
    ran = f"ran {duration(job.running_s)}, waited {duration(job.waiting_s)}"
    resized = f", resized {job.resizes}x (stalled {duration(job.stalled_s)})" if job.resizes else ""
    return f"{job.name}: {job.state.value}{how} ({ran}{resized})"
