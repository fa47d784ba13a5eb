"""Numbers of this moment for Prometheus; what has happened is counted in `metrics`."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

from shoal.server.api.models import Resize
from shoal.server.metrics import Labels

if TYPE_CHECKING:
    from shoal.server.api.routes.common import Server

Gauge = tuple[str, str, Mapping[Labels, float]]
#: Reasons are found one by one; so many, and then whatever else waits has its turn.
SLICE = 25


async def gauges(s: Server) -> list[Gauge]:
    jobs, fragmented = await _jobs(s)
    c = s.conductor
    shares = s.answers.shares().items
    due = {
        (("user", line.user),): line.gpus / line.entitled_gpus for line in shares if line.entitled_gpus > 0
    }
    elastic = c.crews[Resize.LIVE]
    ages = {(("node", node),): age_s for node, age_s in elastic.heartbeat_age_s().items()}  # type: ignore[attr-defined]
    return [
        ("jobs", "Unfinished jobs, by owner, state and why they do not have all they could use.", jobs),
        ("gpus", "GPUs by owner, type and state.", _gpus(s, fragmented)),
        ("user_gpus", "GPUs held by a user.", {(("user", line.user),): float(line.gpus) for line in shares}),
        ("fair_share_ratio", "GPUs held by a user against those it is due; 1 is exactly fair.", due),
        ("agent_heartbeat_age_seconds", "Since the most silent worker of a node was heard.", ages),
        ("guest_jobs", "Jobs on a GPU of another: sharing it, or preparing.", _guests(s)),
        (
            "unmet_jobs",
            "Jobs that were given GPUs which others have not let go yet.",
            {(): float(len(c.unmet))},
        ),
        ("store_bytes", "Size of the store.", {(): float(s.store.size_bytes())}),
        ("last_event", "Number of the last event.", {(): float(s.hub.last_id)}),
    ]


async def _jobs(s: Server) -> tuple[Counter[Labels], bool]:
    """(jobs by labels, whether one waits though enough GPUs for it are free)."""
    found: Counter[Labels] = Counter()
    fragmented = False
    for i, job in enumerate(list(s.conductor.jobs.values())):
        if i % SLICE == SLICE - 1:
            await asyncio.sleep(0)
        if job.is_over:
            continue
        reason = s.answers.reasons.reason(job)
        code = reason.code if reason else ""
        fragmented = fragmented or (code == "Fragmented" and not job.gpus)
        found[("reason", code), ("state", job.life.state.value), ("user", job.user)] += 1
    return found, fragmented


def _guests(s: Server) -> Counter[Labels]:
    lodging = [job for job in s.conductor.jobs.values() if job.lodges]
    return Counter((("as", "preparing" if job.early else "guest"), ("user", job.user)) for job in lodging)


def _gpus(s: Server, fragmented: bool) -> Counter[Labels]:
    """Held ones by user; free ones are idle, or fragmented if a job waits that they would suffice for."""
    c = s.conductor
    found: Counter[Labels] = Counter()

    def add(state: str, gpu_type: str, user: str, gpus: float) -> None:
        found[("state", state), ("type", gpu_type), ("user", user)] += gpus

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
