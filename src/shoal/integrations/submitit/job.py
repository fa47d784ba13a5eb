"""A submitted function: its state, its result, and cancelling it."""

from __future__ import annotations

from typing import Any

from submitit.core import core

from shoal.client import Client
from shoal.server.api.models import Job, JobState

#: submitit's words, which are Slurm's. It takes every other word for the end of the job.
STATES = {
    JobState.PENDING: "PENDING",
    JobState.STARTING: "PENDING",
    JobState.RUNNING: "RUNNING",
    JobState.PAUSED: "PENDING",
    JobState.STOPPING: "COMPLETING",
    JobState.SUCCEEDED: "COMPLETED",
    JobState.FAILED: "FAILED",
    JobState.CANCELLED: "CANCELLED",
}
#: The most jobs that are asked for one by one; more are found in the list of all jobs.
FEW = 20


class ShoalWatcher(core.InfoWatcher):
    """Asks the server for the states of all jobs of this process at once."""

    def _make_command(self) -> list[str] | None:
        return None

    def update(self) -> None:
        wanted = self._registered - self._finished
        if wanted:
            self._num_calls += 1
            with Client() as client:
                found = [client.job(i) for i in wanted] if len(wanted) <= FEW else client.jobs()
            for job in found:
                if str(job.id) in wanted:
                    self._info_dict[str(job.id)] = _info(job)
                    if job.state.is_final:
                        self._finished.add(str(job.id))
        super().update()  # notes when it was asked

    def get_state(self, job_id: str, mode: str = "standard") -> str:
        return self.get_info(job_id, mode=mode).get("State", "UNKNOWN")


class ShoalJob(core.Job[Any]):
    watcher = ShoalWatcher(delay_s=5)

    def cancel(self, check: bool = True) -> None:
        with Client() as client:
            client.cancel(self.job_id)

    def wait(self) -> None:
        """Wait for the end of the job, without polling."""
        with Client() as client:
            if not self.done():
                client.wait(self.job_id)
        self.watcher.get_info(self.job_id, mode="force")

    def _get_outcome_and_result(self) -> tuple[str, Any]:
        if self.state == "CANCELLED":
            self._results_timeout_s = 0  # no result will come
        return super()._get_outcome_and_result()


def _info(job: Job) -> dict[str, str]:
    places = ",".join(place.node for place in job.placement)
    return {"JobID": str(job.id), "State": STATES[job.state], "NodeList": places, "Name": job.name} | (
        {"Message": job.message} if job.message else {}
    )
