"""Counters and histograms of the server, in the text format that Prometheus reads."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    Metric,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from shoal.server.loop.live_job import LiveJob

WAITS_S = (0.1, 0.5, 1, 5, 15, 60, 300, 900, 3600, 4 * 3600, 24 * 3600)
DECISIONS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)
PAUSES_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 15, 60)

# A `_created` series for each series would double what a scrape returns.
disable_created_metrics()  # type: ignore[no-untyped-call]  # prometheus_client does not annotate it


class _LastGauges(Collector):
    """The gauges of the scrape being answered."""

    def __init__(self) -> None:
        self.families: Iterable[Metric] = ()

    def collect(self) -> Iterable[Metric]:
        return self.families


class Metrics:
    """What has happened since this server started. Each server has its own registry."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._gauges = _LastGauges()
        self.registry.register(self._gauges)
        self.resizes = self._counter("resizes_total", "Changes of a job's share.", "direction", "outcome")
        self.preemptions = self._counter(
            "preemptions_total", "Jobs that lost GPUs to others.", "preemptor_user", "victim_user", "kind"
        )
        self.lost_gpu_s = self._counter("lost_gpu_seconds_total", "GPU time held without training.", "cause")
        self.jobs_over = self._counter("jobs_over_total", "Jobs that ended, by final state.", "user", "state")
        self.superseded = self._counter(
            "plan_superseded_total", "Reconfigurations that a newer decision replaced."
        )
        self.requests = self._counter("http_requests_total", "Requests answered, by status.", "status")
        self.queue_wait = self._histogram(
            "queue_wait_seconds", "From submission to the first GPUs.", WAITS_S, "user"
        )
        self.completion = self._histogram(
            "job_completion_seconds", "From submission to the end.", WAITS_S, "user"
        )
        self.decision = self._histogram("decision_seconds", "Time of one decision.", DECISIONS_S, "policy")
        self.resize = self._histogram(
            "resize_seconds", "Time to prepare a resize, and the pause of training.", PAUSES_S, "phase"
        )

    def _counter(self, name: str, help_: str, *labels: str) -> Counter:
        return Counter(f"shoal_{name}", help_, labels, registry=self.registry)

    def _histogram(self, name: str, help_: str, buckets_s: tuple[float, ...], *labels: str) -> Histogram:
        return Histogram(f"shoal_{name}", help_, labels, registry=self.registry, buckets=buckets_s)

    def decided(self, policy: str, seconds: float) -> None:
        self.decision.labels(policy=policy).observe(seconds)

    def resized(self, verb: str) -> None:
        self.resizes.labels(direction=verb, outcome="decided").inc()

    def preempted(self, preemptor: str, victim: str, verb: str) -> None:
        self.preemptions.labels(preemptor_user=preemptor, victim_user=victim, kind=verb).inc()

    def answered(self, status: int) -> None:
        self.requests.labels(status=str(status)).inc()

    def job_over(self, job: LiveJob) -> None:
        life = job.life
        self.jobs_over.labels(user=job.user, state=life.state.value).inc()
        self.completion.labels(user=job.user).observe(life.waiting_s + life.running_s + life.paused_s)

    def text(self, gauges: Iterable[Metric]) -> bytes:
        """The answer to a scrape: these gauges, then all counters and histograms."""
        self._gauges.families = gauges
        return generate_latest(self.registry)
