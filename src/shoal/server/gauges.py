"""Numbers of this moment for Prometheus; what has happened is counted in `metrics`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from shoal.server.metrics import Labels
from shoal.server.models import JobState

if TYPE_CHECKING:
    from shoal.server.routes.common import Server


def gauges(s: Server) -> Iterator[tuple[str, str, Mapping[Labels, float]]]:
    c = s.conductor
    jobs: Counter[Labels] = Counter()
    for job in c.jobs.values():
        reason = s.answers.reason(job) if job.life.state is JobState.PENDING else None
        labels = (
            ("reason", reason.code if reason else ""),
            ("state", job.life.state.value),
            ("user", job.user),
        )
        jobs[labels] += 1
    yield "jobs", "Unfinished jobs, by owner, state and why they wait.", jobs
    gpus: Counter[Labels] = Counter()
    for i, node in enumerate(c.nodes):
        used = c.devices.used_of(i)
        gpus[("state", "allocated"), ("type", node.gpu_type)] += used
        gpus[("state", "idle"), ("type", node.gpu_type)] += node.gpus - used
    yield "gpus", "GPUs by type and whether a worker holds them.", gpus
    shares = s.answers.shares().items
    yield (
        "user_gpus",
        "GPUs held by a user.",
        {(("user", line.user),): float(line.gpus) for line in shares},
    )
    yield (
        "fair_share_ratio",
        "GPUs held by a user against those it is due; 1 is exactly fair.",
        {(("user", line.user),): line.gpus / line.entitled_gpus for line in shares if line.entitled_gpus > 0},
    )
    yield (
        "unmet_jobs",
        "Jobs that were given GPUs which others have not let go yet.",
        {(): float(len(c.unmet))},
    )
    yield "store_bytes", "Size of the store.", {(): float(s.store.size_bytes())}
    yield "last_event", "Number of the last event.", {(): float(s.hub.last_id)}
