"""The scheduler's state in the store: written with the commands of each cycle, read when a server starts.

The snapshot is compact JSON in one setting. The state of a policy contains integers of 128 bits and infinity, which
only the standard library encodes; the columns of the view are large, and msgspec encodes them ten times faster.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from shoal.core.cluster import Cluster
from shoal.core.job import Job
from shoal.core.view_kernels import FLOATS, INTS
from shoal.scheduler.saved import save
from shoal.scheduler.scheduler import Scheduler
from shoal.server.loop.live_job import LiveJob

KEY = "scheduler"
FORMAT = 2


def encode(scheduler: Scheduler) -> dict[str, Any]:
    """The scheduler as the value of a setting."""
    saved = save(scheduler)
    saved["policy_state"] = json.dumps(saved["policy_state"], default=_plain)
    return {"format": FORMAT, "shift_s": 0.0, "text": msgspec.json.encode(saved).decode()}


def decode(value: Mapping[str, Any]) -> dict[str, Any]:
    """What `scheduler.saved.restore` takes."""
    saved: dict[str, Any] = msgspec.json.decode(value["text"])
    saved["policy_state"] = json.loads(saved["policy_state"])
    return saved


def shifted(value: Mapping[str, Any], jump_s: float) -> dict[str, Any]:
    """The setting after the server's clock was moved by `jump_s`."""
    if value.get("format") != FORMAT:
        return dict(value)
    return {**value, "shift_s": value["shift_s"] + jump_s}


def _plain(value: Any) -> Any:
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is not plain data")


def from_previous(
    value: Mapping[str, Any] | None,
    live: Sequence[LiveJob],
    jobs: Mapping[int, Job],
    cluster: Cluster,
    plans: int,
    policy_columns: Sequence[str],
    policy: str,
) -> dict[str, Any]:
    """A snapshot made from the rows of the jobs, for a store of a version that kept no snapshot.

    That version saved the state of the policy and up to three columns of each job; shares are in the targets.
    """
    kept = value if value and value.get("policy") == policy else {}
    rows = [_row(job, jobs[job.id], cluster) for job in live]
    for job, row in zip(live, rows):
        before = (kept.get("rows") or {}).get(str(job.id)) or []
        row |= dict.fromkeys(policy_columns, 0.0) | dict(zip(policy_columns, before))
    columns = {name: [row[name] for row in rows] for name in (*FLOATS, *policy_columns, *INTS)}
    return {
        "policy": policy,
        "policy_state": kept.get("state"),
        "users": [[user.name, user.tickets] for user in cluster.users],
        "nodes": _names(cluster, live),
        "gpu_types": list(cluster.gpu_types),
        "ids": [job.id for job in live],
        "ranges": [[job.min_gpus, job.max_gpus, job.requested_gpus] for job in live],
        "columns": columns,
        "held": [],
        "placements": {job.id: sorted(job.target.items()) for job in live if job.target},
        "caps": {},
        "lost_nodes": [],
        "plans": plans,
        "events_seen": 0,
        "unplanned": {},
    }


def _row(job: LiveJob, core: Job, cluster: Cluster) -> dict[str, float]:
    life = job.life
    row: dict[str, float] = dict.fromkeys((*FLOATS, *INTS), 0)
    row |= {"submit_s": life.submitted_s, "weight": core.weight, "attained_gpu_s": life.gpu_s}
    row |= {"total": core.iterations or np.nan, "remaining": core.iterations or np.nan}
    row |= {"settled_s": life.settled_s, "changed_s": life.settled_s, "generation": job.generation}
    started_s = np.inf if life.started_s is None else life.started_s
    row |= {"first_start_s": started_s, "last_start_s": started_s, "gpu_type": -1}
    if job.target:
        first = min(job.target)
        row |= {"gpus": sum(job.target.values()), "gpu_type": 0}
        if first < len(cluster.nodes):
            row["gpu_type"] = int(cluster.type_of_node[first])
        if life.started_s is None:  # it waits for GPUs that others still hold
            row["last_start_s"] = life.settled_s
    return row


def _names(cluster: Cluster, live: Sequence[LiveJob]) -> list[str]:
    """The names of the nodes by index. Targets may be on nodes that the cluster no longer has."""
    most = max((node for job in live for node in job.target), default=-1)
    names = [node.name for node in cluster.nodes]
    return names + [f"node {i} of before" for i in range(len(names), most + 1)]
