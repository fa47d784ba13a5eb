"""Simulated jobs whose size the autoscaler searches while they run (`knowledge.size_search`).

The search observes `decide_every_steps` steps at a share, with noise, and then decides. A job that waits for a
requested size, or has settled, is checked every `RECHECK_S` and whenever its share changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from shoal.core.cluster import Cluster
from shoal.core.events import Capped
from shoal.core.job import Job
from shoal.knowledge.heuristics import Progress
from shoal.knowledge.size_search import Autoscale, SizeSearch

NOISE = 0.05
RECHECK_S = 600.0


class SizeSearches:
    """One search for each job that requests it."""

    def __init__(
        self,
        jobs: Sequence[Job],
        cluster: Cluster,
        rng: np.random.Generator,
        *,
        transition_s: float = 0.0,
        noise: float = NOISE,
    ) -> None:
        self.rng, self.noise = rng, noise
        asked = {word: Autoscale.parse(word) for word in {job.autoscale for job in jobs} if word}
        self.searches = {
            j: SizeSearch(
                asked[job.autoscale].in_steps_of(job.gpus.step),
                job.gpus.min,
                job.gpus.floor(min(job.gpus.max, cluster.total_gpus)),
                transition_s=transition_s,
            )
            for j, job in enumerate(jobs)
            if job.autoscale
        }
        self._changes = 0
        #: Seconds from a job's first step until its size was found for the first time.
        self._found_s: dict[int, float] = {}

    def begin(self, j: int) -> list[Capped]:
        """Events for the scheduler when a job arrives."""
        return [self._event(j)] if j in self.searches else []

    def next_s(self, j: int, gpus: int, rate: float) -> float | None:
        """Seconds of training at this share until the search should decide; None: never."""
        search = self.searches.get(j)
        if search is None or rate <= 0:
            return None
        steps_s = search.engine.steps_due(gpus) / rate
        return max(RECHECK_S, steps_s) if search.engine.rests_at(gpus) else steps_s

    def decide(self, j: int, gpus: int, rate: float, elapsed_s: float, left: float) -> list[Capped]:
        """Let the search decide after some steps at this rate; returns the events for the scheduler."""
        search = self.searches[j]
        for factor in np.exp(self.rng.normal(0.0, self.noise, search.engine.steps_due(gpus))).tolist():
            search.observe(gpus, factor / rate)
        cap = search.decide(Progress(elapsed_s, left))
        if cap is None:
            return []
        self._changes += 1
        if not cap.searching:
            self._found_s.setdefault(j, elapsed_s)
        return [self._event(j)]

    def _event(self, j: int) -> Capped:
        cap = self.searches[j].cap
        return Capped(j, cap.gpus, cap.why)

    def figures(self) -> dict[str, Any]:
        """Number of jobs, of jobs that found a size and of cap changes, and the median time of the first search."""
        found = list(self._found_s.values())
        return {
            "jobs": len(self.searches),
            "found": len(found),
            "changes": self._changes,
            "median_search_s": float(np.median(found)) if found else None,
        }
