"""Arrays and sweeps as one line each in a table of jobs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from shoal.cli import jobs_table as t
from shoal.cli.of_array import ORDER, states
from shoal.cli.out import duration
from shoal.cli.times import ago
from shoal.core.words import listed

if TYPE_CHECKING:
    from shoal.server.api.models import Array, Job

#: Idle tasks that are named.
MOST_NAMED = 3


def rows(jobs: Sequence[Job], array_of: Callable[[int], Array]) -> list[list[str]]:
    """The default columns, with all listed jobs of an array as one row in the place of the first."""
    tasks: dict[int, list[Job]] = {}
    for job in jobs:
        if job.array is not None:
            tasks.setdefault(job.array.id, []).append(job)
    made, done = [], set()
    for job in jobs:
        if job.array is None:
            made.append(t.row(job))
        elif job.array.id not in done:
            done.add(job.array.id)
            made.append(_row(tasks[job.array.id], array_of(job.array.id)))
    return made


def _row(listed_jobs: Sequence[Job], array: Array) -> list[str]:
    newest = listed_jobs[0]
    over = sum(array.jobs.get(state, 0) for state in ("succeeded", "failed", "cancelled"))
    state = next((s for s in ORDER if array.jobs.get(s)), "pending")
    reasons = Counter(t.reason(job) for job in listed_jobs if job.reason is not None and not job.gpus)
    why = f"; {reasons.most_common(1)[0][0]}" if reasons else ""
    idle = _idle(listed_jobs)
    return [
        f"{array.name}[{array.tasks}]",
        array.user,
        state,
        str(array.gpus) if array.gpus else "-",
        t.want(newest),
        "-",
        f"{over / array.tasks:.0%}",
        ago(array.created_at),
        f"{idle}{states(array)}{why}",
    ]


def _idle(jobs: Sequence[Job]) -> str:
    """Names the tasks that hold GPUs without using them."""
    idle = sorted((job for job in jobs if job.idle_s is not None), key=lambda job: -(job.idle_s or 0.0))
    if not idle:
        return ""
    names = listed([job.name for job in idle[:MOST_NAMED]], len(idle))
    uses = "uses" if len(idle) == 1 else "use"
    return f"{names} {uses} no GPU (idle for up to {duration(idle[0].idle_s)}); "
