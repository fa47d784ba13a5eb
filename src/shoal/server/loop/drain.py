"""Nodes that go out of use and come back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.core.events import NodeBack, NodeLost
from shoal.core.words import counted

if TYPE_CHECKING:
    from shoal.server.loop.conductor import Conductor


def lose_node(c: Conductor, node: int) -> None:
    """Its GPUs are out of use. Jobs there keep what they have elsewhere if that is enough for them."""
    c.drained.add(node)
    scheduler = c.scheduler
    for job_id, placement in list(scheduler.placements.items()):
        job = c.jobs.get(job_id)
        if job is None or all(at != node for at, _ in placement):
            continue
        rest = {at: gpus for at, gpus in placement if at != node}
        before, enough = job.target_gpus, sum(rest.values()) >= job.min_gpus
        job.target = rest if scheduler.policy.elastic and enough else {}
        text = f"{c.nodes[node].name} is out of use: {before} -> {counted(job.target_gpus, 'GPU')}"
        c.outbox.event("job.target", text, job, verb="lose", from_gpus=before, to_gpus=job.target_gpus)
        c.outbox.job(job)
        c.soon(job)
    c.post(NodeLost(node))


def node_back(c: Conductor, node: int) -> None:
    c.drained.discard(node)
    c.post(NodeBack(node))
