"""Jobs that wait for the ends of others: which ends are still to come, and which can never let a job run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shoal.core.job import After, When
from shoal.server.api.models import JobState
from shoal.server.loop.live_job import LiveJob
from shoal.server.store.store import Store


def has_succeeded(store: Store, job_id: int) -> bool:
    """Whether a job that has ended did so well."""
    row = store.job(job_id)
    return row is not None and row["state"] == JobState.SUCCEEDED.value


def afters(spec: Mapping[str, Any]) -> list[After]:
    """The jobs that a recorded specification names."""
    return [After(one["job"], When(one["on"])) for one in spec.get("after") or ()]


class Dependencies:
    def __init__(self, jobs: Mapping[int, LiveJob], store: Store) -> None:
        """`jobs` are the unfinished ones."""
        self._jobs, self._store = jobs, store

    def unmet(self, job: LiveJob) -> tuple[After, ...]:
        """The ends that the job still waits for. One that can never come is among them."""
        return tuple(after for after in afters(job.spec) if not self._is_met(after))

    def _is_met(self, after: After) -> bool:
        return not self._is_to_come(after) and after.when.allows(has_succeeded(self._store, after.job_id))

    def _is_to_come(self, after: After) -> bool:
        return after.job_id in self._jobs and not self._jobs[after.job_id].is_over

    def never(self, job: LiveJob) -> str | None:
        """Why the job can never run; None if it can."""
        for after in self.unmet(job):
            if not self._is_to_come(after):
                row = self._store.job(after.job_id)
                name, state = (row["name"], row["state"]) if row else (f"job {after.job_id}", "is gone")
                how = "was cancelled" if state == JobState.CANCELLED.value else state
                return f"it was to run after the {after.when.value} of {name}, which {how}"
        return None

    def of(self, job_id: int) -> list[LiveJob]:
        """The unfinished jobs that wait for the end of this one."""
        return [
            job
            for job in self._jobs.values()
            if any(one["job"] == job_id for one in job.spec.get("after") or ()) and not job.is_over
        ]
