"""The jobs that a submission waits for: found by number or name, and checked."""

from __future__ import annotations

from typing import Any

from shoal.server.api.models import JobSpec, JobState
from shoal.server.services.errors import Conflict, Invalid
from shoal.server.services.naming import printable
from shoal.server.store import tables as t
from shoal.server.store.change import Row
from shoal.server.store.store import Store

#: Ends of other jobs that one submission may wait for.
MAX_WAITS = 10_000


def waits_for(spec: JobSpec, store: Store, only: str | None) -> list[dict[str, Any]]:
    """[{"job": 12, "name": "prepare", "on": "success"}]: only ends that are still to come.

    A submission names jobs that exist already, so no two jobs can wait for each other. `only`: the user whose jobs may
    be named; None for all.
    """
    found: dict[tuple[int, str], dict[str, Any]] = {}
    for one in spec.after:
        for row in _named(store, one.job, only):
            succeeded = row["state"] == JobState.SUCCEEDED.value
            if not JobState(row["state"]).is_final:
                found[row["id"], one.on] = {"job": row["id"], "name": row["name"], "on": one.on.value}
            elif not one.on.allows(succeeded):
                how = "was cancelled" if row["state"] == JobState.CANCELLED.value else row["state"]
                raise Conflict(
                    f"after: {row['name']} {how}, so a job that waits for its {one.on.value} could never run",
                    "leave it out, or submit that job again first",
                )
    if len(found) > MAX_WAITS:
        raise Invalid(f"after: {len(found)} jobs are too many to wait for; at most {MAX_WAITS}", "after")
    return list(found.values())


def _named(store: Store, job: str, only: str | None) -> list[Row]:
    """The job of this number or name, or all jobs of the array of this name."""
    row = None
    if job.isascii() and job.isdigit() and len(job) < 18:
        row = store.job(int(job))
    elif all(31 < ord(c) != 127 and not 0xD800 <= ord(c) < 0xE000 for c in job):
        row = store.job_named(job, only)
        if row is None:
            arrays = [a for a in store.rows_of(t.arrays, t.arrays.c.name == job) if only in (None, a["user"])]
            if arrays:
                return store.rows_of(t.jobs, t.jobs.c.array == arrays[-1]["id"])
    if row is None or only not in (None, row["user"]):
        raise Invalid(
            f"after: there is no job {printable(job)!r}; submit it first (`shoal ps -a` lists your jobs)",
            "after",
        )
    return [row]
