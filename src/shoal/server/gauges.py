"""Current values for Prometheus, computed at each scrape. `metrics` counts what has happened."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from prometheus_client import Metric
from prometheus_client.metrics_core import GaugeMetricFamily

from shoal.server.api.models import Resize

if TYPE_CHECKING:
    from shoal.server.api.routes.common import Server

#: Values of a family by the values of its labels, in the order of the label names.
Values = Mapping[tuple[str, ...], float]
#: Jobs to explain before other tasks of the event loop get a turn.
SLICE = 25


async def gauges(s: Server) -> list[Metric]:
    jobs, fragmented = await _jobs(s)
    c = s.conductor
    shares = s.answers.shares().items
    held = {(line.user,): line.gpus for line in shares}
    ratio = {(line.user,): line.gpus / line.entitled_gpus for line in shares if line.entitled_gpus > 0}
    elastic = c.crews[Resize.LIVE]
    ages = {(node,): age_s for node, age_s in elastic.heartbeat_age_s().items()}  # type: ignore[attr-defined]
    return [
        _gauge(
            "jobs",
            "Unfinished jobs, by owner, state and why they do not have all they could use.",
            jobs,
            ("user", "state", "reason"),
        ),
        _gauge("gpus", "GPUs by owner, type and state.", _gpus(s, fragmented), ("user", "type", "state")),
        _gauge("user_gpus", "GPUs held by a user.", held, ("user",)),
        _gauge("fair_share_ratio", "GPUs held by a user over GPUs it is due; 1 is fair.", ratio, ("user",)),
        _gauge(
            "agent_heartbeat_age_seconds", "Age of the oldest heartbeat of a node's workers.", ages, ("node",)
        ),
        _gauge("guest_jobs", "Jobs on a GPU of another job: co-located or preparing.", _guests(s), ("user", "as")),
        _gauge("unmet_jobs", "Jobs given GPUs that others have not released yet.", {(): len(c.unmet)}),
        _gauge("store_bytes", "Size of the store.", {(): s.store.size_bytes()}),
        _gauge("last_event", "Id of the last event.", {(): s.hub.last_id}),
    ]  # fmt: skip


def _gauge(name: str, help_: str, values: Values, labels: Iterable[str] = ()) -> Metric:
    family = GaugeMetricFamily(f"shoal_{name}", help_, labels=tuple(labels))
    for key, value in sorted(values.items()):
        family.add_metric(key, float(value))
    return family


async def _jobs(s: Server) -> tuple[Counter[tuple[str, ...]], bool]:
    """(jobs by labels, whether a job waits although enough GPUs for it are free)."""
    found: Counter[tuple[str, ...]] = Counter()
    fragmented = False
    for i, job in enumerate(list(s.conductor.jobs.values())):
        if i % SLICE == SLICE - 1:
            await asyncio.sleep(0)
        if job.is_over:
            continue
        reason = s.answers.reasons.reason(job)
        code = reason.code if reason else ""
        fragmented = fragmented or (code == "Fragmented" and not job.gpus)
        found[job.user, job.life.state.value, code] += 1
    return found, fragmented


def _guests(s: Server) -> Counter[tuple[str, ...]]:
    lodging = [job for job in s.conductor.jobs.values() if job.lodges]
    return Counter((job.user, "preparing" if job.early else "guest") for job in lodging)


def _gpus(s: Server, fragmented: bool) -> Values:
    """Held GPUs by user. Free GPUs are fragmented if a job waits that needs no more than these, else idle."""
    c = s.conductor
    found: dict[tuple[str, ...], float] = {}

    def add(state: str, gpu_type: str, user: str, gpus: float) -> None:
        key = (user, gpu_type, state)
        found[key] = found.get(key, 0.0) + gpus

    for i, node in enumerate(c.nodes):
        free = node.gpus - c.devices.used_of(i)
        add("fragmented", node.gpu_type, "", free if fragmented else 0)
        add("idle", node.gpu_type, "", 0 if fragmented else free)
    for job in c.jobs.values():
        for worker in job.workers.values():
            if worker.holds_gpu and worker.device[0] >= 0:
                add("allocated", c.nodes[worker.device[0]].gpu_type, job.user, 1)
    for state in ("borrowed", "lent"):
        for user, gpu_type, gpus in s.answers.ledger_rates(state):
            add(state, gpu_type, user, gpus)
    return found
