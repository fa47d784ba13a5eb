"""What was decided, as orders on record: a new target for each job, and for those who lose GPUs who gets them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from shoal.core.plan import Reconfigure
from shoal.core.words import counted
from shoal.server.loop.live_job import LiveJob

if TYPE_CHECKING:
    from shoal.server.loop.conductor import Conductor

#: Of one decision: how many gainers are named to a loser, and how many losers get the numbers behind it.
MOST_NAMED, MOST_EXPLAINED = 5, 50


def order(c: Conductor, commands: Sequence[Reconfigure]) -> None:
    """Put down what was decided: for those who lose GPUs also who gets some by the same decision, and why."""
    moves = [
        (job, command, job.target_gpus)
        for command in commands
        if (job := c.jobs.get(command.job)) is not None and not job.is_over
    ]
    gains = sorted(
        ((command.share.gpus - before, job) for job, command, before in moves), key=lambda g: -g[0]
    )
    winners = [job for gain, job in gains if gain > 0]
    explained = 0
    for job, command, before in moves:
        gpus = command.share.gpus
        data: dict[str, Any] = {"verb": command.verb, "from_gpus": before, "to_gpus": gpus}
        if gpus < before and winners:
            data |= {"policy": c.policy_name, "by": [w.id for w in winners[:MOST_NAMED]]}
            if explained < MOST_EXPLAINED and job.id in c.scheduler.view:
                explained += 1
                reason = c.scheduler.outcome(job.id, c.now_s()).reason
                data["reason"] = reason and c.profiles.in_full(job, reason).model_dump()
            c.metrics.preempted(winners[0].user, job.user, command.verb)
        _aim_at(c, job, command)
        c.outbox.event("job.target", f"{command.verb}: {before} -> {counted(gpus, 'GPU')}", job, **data)
        c.metrics.resized(command.verb)


def _aim_at(c: Conductor, job: LiveJob, command: Reconfigure) -> None:
    gpus = command.share.gpus
    # Without nodes to tell apart there is no placement: the first node is all there is.
    job.target = dict(command.placement) or ({0: gpus} if gpus else {})
    job.gpu_type = command.share.gpu_type if gpus else job.gpu_type
    job.plan, job.refused = command.plan, 0
    c.outbox.job(job)
    c._changed.add(job.id)
