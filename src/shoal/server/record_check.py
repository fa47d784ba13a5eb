"""Compare the store with the home's directories at the start: the store may be a restored backup, or empty."""

from __future__ import annotations

from collections.abc import Container, Iterable

from shoal.core.errors import ShoalError
from shoal.core.words import counted
from shoal.server.home import Home
from shoal.server.loop.live_job import LiveJob
from shoal.server.store.store import Store


class WrongRecord(ShoalError):
    """The store does not belong to this home."""

    exit_code = 5


def refuse_missing_database(home: Home) -> None:
    """Raise if the home has jobs but no database, before one is made: its files would mix with a restored one."""
    database = home.database
    jobs = sum(p.name.isdigit() for p in home.jobs.iterdir())
    if jobs and not (database.exists() and database.stat().st_size):
        raise WrongRecord(_no_record(home, jobs))


def _no_record(home: Home, jobs: int) -> str:
    return (
        f"{home.jobs} has {counted(jobs, 'job')}, but the database is missing, empty or new: "
        f"restore the backup of the database (docs/operate.md), or move {home.jobs} away to begin anew"
    )


def check_record(home: Home, store: Store, now_s: float) -> list[int]:
    """Make sure that no id of a job is used twice. Return the jobs that have a directory but no record.

    A job that was submitted after the backup has a directory with its checkpoint, and a new job must not get it. Jobs
    that have removed theirs are covered by `high_water`.
    """
    directories = sorted(int(p.name) for p in home.jobs.iterdir() if p.name.isdigit())
    if not directories:
        return []
    last = store.last_job()
    if last == 0:
        raise WrongRecord(_no_record(home, len(directories)))
    if directories[-1] > last:
        with store.change(now_s) as change:
            change.continue_ids_after(directories[-1])
    known = store.job_ids()
    return [job_id for job_id in directories if job_id not in known]


def forget_left_secrets(home: Home, store: Store, active: Container[int]) -> None:
    """Delete secrets of jobs that are over: the last server may have been killed before it did."""
    holders = {int(p.parent.name) for p in home.jobs.glob("*/secret*") if p.parent.name.isdigit()}
    known = store.job_ids() if holders else set()
    for job_id in holders:
        if job_id in known and job_id not in active:
            home.forget_secrets(job_id)


def continue_worker_ids(home: Home, jobs: Iterable[LiveJob]) -> None:
    """Give no id of a worker twice: a directory with the files of an earlier worker shows that its id was used."""
    for job in jobs:
        names = [p.name.partition(".")[2] for p in (home.job(job.id) / "workers").glob(f"{job.id}.*")]
        numbers = [int(name) for name in names if name.isdigit()]
        job.next_worker = max(job.next_worker, 1 + max(numbers, default=-1))
