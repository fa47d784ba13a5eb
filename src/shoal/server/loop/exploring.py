"""Exploration on the live cluster: what it measures by, and the events that record its trials."""

from __future__ import annotations

from collections.abc import Mapping

from shoal.core.plan import Plan
from shoal.scheduler.exploration.budget import Budget
from shoal.scheduler.exploration.exploration import Exploration
from shoal.scheduler.exploration.worth import Sampling
from shoal.server.loop.learning import ENOUGH_SAMPLES, ENOUGH_STEPS
from shoal.server.loop.live_job import LiveJob
from shoal.server.loop.outbox import Outbox


def make_exploration(share: float) -> Exploration | None:
    """`share`: the part of the GPU time in which jobs may be measured at other sizes; 0: none."""
    if share <= 0:
        return None
    return Exploration(Budget(share), Sampling(steps=ENOUGH_STEPS, most=ENOUGH_SAMPLES))


def record_trials(plan: Plan, jobs: Mapping[int, LiveJob], outbox: Outbox) -> None:
    """Record the trials that began or ended with this plan."""
    for note in plan.trials:
        job = jobs.get(note.job_id)
        if job is not None:
            kind = "job.measuring" if note.began else "job.measured"
            data = {"gpus": note.gpus, "gpu_type": note.gpu_type, "steps": note.steps}
            outbox.event(kind, note.sentence, job, **data)
