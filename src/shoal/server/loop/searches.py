"""The autoscaler for live jobs: measured steps in, limits for the scheduler out."""

from __future__ import annotations

from collections.abc import Callable

from shoal.core.errors import ShoalError
from shoal.core.events import Capped
from shoal.knowledge.heuristics import Progress
from shoal.knowledge.size_search import BY_REPORT, Autoscale, SizeSearch
from shoal.server.loop.live_job import LiveJob
from shoal.server.loop.outbox import Outbox
from shoal.server.loop.profiles import Profiles, TakeIn


class Searches:
    def __init__(
        self,
        profiles: Profiles,
        outbox: Outbox,
        warnings: list[str],
        take_in: TakeIn,
        elastic: Callable[[], bool],
    ) -> None:
        """`take_in` takes events for the scheduler; `elastic`: whether the policy resizes jobs."""
        self._profiles, self._outbox, self._warnings = profiles, outbox, warnings
        self._take_in, self._elastic = take_in, elastic
        self._searches: dict[int, SizeSearch | None] = {}

    def of(self, job: LiveJob) -> SizeSearch | None:
        """The search of a job with an autoscaler; None for others."""
        if job.id not in self._searches:
            self._searches[job.id] = self._begin(job) if job.spec.get("autoscale") else None
        return self._searches[job.id]

    def _begin(self, job: LiveJob) -> SizeSearch | None:
        try:
            asked = Autoscale.parse(job.spec["autoscale"])
        except ShoalError as error:  # what it asked for is no longer installed
            self._warnings.append(f"job {job.name} goes on without its autoscaler: {error}")
            return None
        if job.search is not None:
            try:
                return SizeSearch.from_dict(job.search, asked.in_steps_of(job.step_gpus), BY_REPORT)
            except ShoalError as error:
                self._warnings.append(f"the autoscaler of job {job.name} begins anew: {error}")
        return SizeSearch(
            asked.in_steps_of(job.step_gpus), job.min_gpus, self._profiles.limit(job), BY_REPORT
        )

    def cap_events(self, job: LiveJob) -> list[Capped]:
        """The event that sets the autoscaler's limit for this job; empty if the job has no autoscaler."""
        search = self.of(job)
        return [Capped(job.id, search.cap.gpus, search.cap.why)] if search is not None else []

    def measured(self, job: LiveJob, gpus: int, step_s: float, batch_size: int) -> None:
        """Take in the mean step time of a live job."""
        search = self.of(job)
        if search is None or not self._elastic():
            return
        samples = float(batch_size or 1)
        search.observe(gpus, step_s, samples)
        hold = search.decide(Progress(self._profiles.running_s(job), self._left(job, samples)))
        job.search = search.to_dict()
        if hold is not None:
            data = {"gpus": hold.gpus, "searching": hold.searching}
            self._outbox.event("job.autoscaled", hold.why, job, **data)
            self._outbox.job(job)
            self._take_in(*self.cap_events(job))

    def _left(self, job: LiveJob, samples: float) -> float | None:
        length = self._profiles.length(job)
        return None if length.assumed else length.steps * samples

    def rescaled(self, job: LiveJob) -> list[Capped]:
        """Its owner has changed its range."""
        search = self.of(job)
        if search is None:
            return []
        search.rescaled(job.min_gpus, self._profiles.limit(job))
        job.search = search.to_dict()
        return self.cap_events(job)

    def forget(self, job: LiveJob) -> None:
        self._searches.pop(job.id, None)
