"""Counters and histograms of the server, and the text in which Prometheus reads them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shoal.server.loop.live_job import LiveJob

Labels = tuple[tuple[str, str], ...]

WAITS = (0.1, 0.5, 1, 5, 15, 60, 300, 900, 3600, 4 * 3600, 24 * 3600)
MOMENTS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)
PAUSES = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 15, 60)


class Histogram:
    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts: dict[Labels, list[int]] = {}
        self.sums: dict[Labels, float] = {}

    def observe(self, value: float, **labels: str) -> None:
        key = tuple(sorted(labels.items()))
        counts = self.counts.setdefault(key, [0] * (len(self.bounds) + 1))
        counts[bisect_left(self.bounds, value)] += 1
        self.sums[key] = self.sums.get(key, 0.0) + value


class Counter:
    def __init__(self) -> None:
        self.values: dict[Labels, float] = {}

    def add(self, value: float = 1.0, **labels: str) -> None:
        key = tuple(sorted(labels.items()))
        self.values[key] = self.values.get(key, 0.0) + value


class Metrics:
    """What has happened since this server started."""

    def __init__(self) -> None:
        self.queue_wait = Histogram(WAITS)
        self.completion = Histogram(WAITS)
        self.decision = Histogram(MOMENTS)
        self.resize = Histogram(PAUSES)
        self.resizes = Counter()
        self.preemptions = Counter()
        self.lost_gpu_s = Counter()
        self.jobs_over = Counter()
        self.superseded = Counter()
        self.requests = Counter()

    def decided(self, policy: str, seconds: float) -> None:
        self.decision.observe(seconds, policy=policy)

    def resized(self, verb: str) -> None:
        self.resizes.add(direction=verb, outcome="decided")

    def preempted(self, preemptor: str, victim: str, verb: str) -> None:
        self.preemptions.add(preemptor_user=preemptor, victim_user=victim, kind=verb)

    def job_over(self, job: LiveJob) -> None:
        life = job.life
        self.jobs_over.add(user=job.user, state=life.state.value)
        self.completion.observe(life.waiting_s + life.running_s + life.paused_s, user=job.user)

    def text(self, gauges: Iterable[tuple[str, str, Mapping[Labels, float]]]) -> str:
        """The exposition format; `gauges` are (name, help, value by labels) of the moment."""
        out: list[str] = []
        for name, help_, values in gauges:
            _series(out, f"shoal_{name}", "gauge", help_, values)
        for name, help_, counter in (
            ("resizes_total", "Changes of a job's share, by what they were.", self.resizes),
            ("preemptions_total", "Jobs that lost GPUs to others, by both owners and how.", self.preemptions),
            ("lost_gpu_seconds_total", "GPU time held without training, by cause.", self.lost_gpu_s),
            ("jobs_over_total", "Jobs that ended, by how.", self.jobs_over),
            ("plan_superseded_total", "Reconfigurations that a newer decision replaced.", self.superseded),
            ("http_requests_total", "Requests answered, by status.", self.requests),
        ):
            _series(out, f"shoal_{name}", "counter", help_, counter.values)
        for name, help_, histogram in (
            ("queue_wait_seconds", "From submission to the first GPUs.", self.queue_wait),
            ("job_completion_seconds", "From submission to the end.", self.completion),
            ("decision_seconds", "Time one decision took.", self.decision),
            (
                "resize_seconds",
                "Of a resize: until it was prepared; how long training stood still.",
                self.resize,
            ),
        ):
            _histogram(out, f"shoal_{name}", help_, histogram)
        return "\n".join(out) + "\n"


def _labels(labels: Labels) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{k}="{_escape(v)}"' for k, v in labels) + "}"


def _escape(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _series(out: list[str], name: str, kind: str, help_: str, values: Mapping[Labels, float]) -> None:
    out.append(f"# HELP {name} {help_}")
    out.append(f"# TYPE {name} {kind}")
    out += [f"{name}{_labels(labels)} {value:.10g}" for labels, value in sorted(values.items())]


def _histogram(out: list[str], name: str, help_: str, histogram: Histogram) -> None:
    out.append(f"# HELP {name} {help_}")
    out.append(f"# TYPE {name} histogram")
    for labels, counts in sorted(histogram.counts.items()):
        total = 0
        for bound, count in zip((*map(str, histogram.bounds), "+Inf"), counts):
            total += count
            out.append(f"{name}_bucket{_labels((*labels, ('le', bound)))} {total}")
        out.append(f"{name}_sum{_labels(labels)} {histogram.sums[labels]:.10g}")
        out.append(f"{name}_count{_labels(labels)} {total}")
