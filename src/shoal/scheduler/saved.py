"""A scheduler's state as plain data, and back: after it the same decisions follow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from shoal.core.cluster import Cluster
from shoal.core.events import Capped
from shoal.core.job import Job
from shoal.core.profile import Profile
from shoal.placement.placer import Placer
from shoal.policies.base import Policy
from shoal.scheduler.scheduler import Scheduler


def save(scheduler: Scheduler) -> dict[str, Any]:
    """All that the next decision depends on besides the jobs, their profiles and the cluster (JSON-able)."""
    view = scheduler.view
    return {
        "policy": scheduler.policy.name,
        "policy_state": scheduler.policy.state(),
        "rows": {int(i): view.dump(row) for row, i in enumerate(view.job_ids)},
        "held": {i: [part.tolist() for part in kept] for i, kept in scheduler.held.items()},
        "placements": {i: [list(p) for p in where] for i, where in scheduler.placements.items()},
        "caps": {i: [cap.gpus, cap.why] for i, cap in scheduler.caps.items()},
        "lost_nodes": sorted(scheduler.lost_nodes),
        "plans": scheduler.plans,
        "events_seen": scheduler.events_seen,
    }


def restore(
    saved: Mapping[str, Any],
    cluster: Cluster,
    policy: Policy,
    jobs: Mapping[int, Job],
    profiles: Mapping[int, Profile],
    placer: Placer | None = None,
    *,
    cool_down_s: float = 0.0,
) -> Scheduler:
    """The scheduler that was saved, given the jobs it knew. Keys may be words, as JSON makes them."""
    scheduler = Scheduler(cluster, policy, placer, cool_down_s=cool_down_s)
    view = scheduler.view
    everyone = {int(i): row for i, row in saved["rows"].items()}
    held = {int(i): kept for i, kept in saved["held"].items()}
    for job_id in sorted({*everyone, *held}):
        job, profile = jobs[job_id], profiles[job_id]
        scheduler.jobs[job_id], scheduler.profiles[job_id] = job, profile
        view.add(job_id, job, profile, scheduler.user_index(job.user), job.submit_s)
        if job_id in everyone:
            view.load(view.row(job_id), everyone[job_id])
        else:
            floats, ints = held[job_id]
            _, typed = view.park(job_id)
            kept = np.array(ints, np.int32)
            # Where the curves begin depends on the order in which profiles were met.
            kept[-2 * len(view.gpu_types) :] = typed[-2 * len(view.gpu_types) :]
            scheduler.held[job_id] = (np.array(floats), kept)
    scheduler.placements = {
        int(i): tuple((int(n), int(g)) for n, g in where) for i, where in saved["placements"].items()
    }
    for i, (gpus, why) in saved.get("caps", {}).items():
        scheduler.take_in(Capped(int(i), gpus, why), 0.0)
    scheduler.lose_nodes(saved["lost_nodes"])
    scheduler.plans = saved["plans"]
    scheduler.events_seen = saved["events_seen"]
    policy.restore(saved["policy_state"])
    return scheduler
