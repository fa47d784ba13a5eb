"""What a server knows when it starts, and what it keeps so that the next one does: jobs, workers, the scheduler."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import numpy as np

from shoal.core.cluster import Cluster, Node, User
from shoal.core.errors import ShoalError
from shoal.core.events import Held, Submitted
from shoal.placement.registry import Setting, make_placer
from shoal.policies.registry import make_policy
from shoal.scheduler.scheduler import Scheduler
from shoal.server.api.models import JobState, Resize
from shoal.server.loop.live_job import LEAVING, STOPPED, LiveJob, LiveWorker

if TYPE_CHECKING:
    from shoal.server.loop.control_loop import ControlLoop

log = logging.getLogger("shoal.server")
#: What moving a job is reckoned to cost it, in seconds without progress: far more than the pause of a switch.
MOVE_S = 5.0


def make_cluster(c: ControlLoop) -> Cluster:
    nodes = tuple(Node(n.name, n.gpus, n.gpu_type, n.rack, n.domain) for n in c.nodes)
    tickets = {u["name"]: u["tickets"] for u in c.store.users()}
    # Accounts of the ledger go by position: who was there before keeps theirs.
    before = (c.store.get("ledger") or {}).get("state", {}).get("users", [])
    names = dict.fromkeys([*before, *tickets])
    return Cluster(nodes, tuple(User(name, tickets.get(name, 1.0)) for name in names))


def make_scheduler(c: ControlLoop) -> Scheduler:
    policy = make_policy(c.policy_name, c.policy_options)
    setting = Setting(
        c.cluster,
        policy.elastic,
        lambda: c.scheduler.profiles,
        MOVE_S,
        may_move=lambda job_id: job_id in c.jobs and c.jobs[job_id].resize is Resize.LIVE,
        policy=policy.name,
    )
    placer = make_placer(c.placement, setting)
    scheduler = Scheduler(c.cluster, policy, placer, cool_down_s=c.cool_down_s)
    scheduler.lose_nodes(c.drained)
    return scheduler


def remember_worker(c: ControlLoop, row: dict[str, Any]) -> None:
    job = c.jobs.get(row["job"])
    node = next((i for i, n in enumerate(c.nodes) if n.name == row["node"]), None)
    if job is None or node is None or row["gpu"] >= c.nodes[node].gpus:
        # The cluster has shrunk since: its process is ended, its place is gone.
        c.warnings.append(f"worker {row['id']} was on a GPU that is no longer there; it is ended")
        node = None
    device = (node if node is not None else -1, row["gpu"])
    worker = LiveWorker(row["id"], device, row["node"], row["started_s"], row["rank"], row["state"])
    if job is None:
        return
    job.workers[worker.id] = worker
    worker.lodges = job.lodges and worker.state != STOPPED
    if node is None:
        worker.state = LEAVING
    elif worker.lodges:
        c.devices.lodge(device, worker.id)
    elif worker.state != STOPPED:
        c.devices.give(device, worker.id)


def fill_scheduler(c: ControlLoop, *, restore: bool) -> None:
    """Tell a new scheduler of all jobs and of what they have."""
    now_s, scheduler = c.now_s(), c.scheduler
    saved = c.store.get("scheduler") if restore else None
    memory = saved["rows"] if saved and saved["policy"] == c.policy_name else {}
    if memory:
        try:
            scheduler.policy.restore(saved["state"])
        except Exception:
            log.exception("the policy could not go on from its saved state; it begins anew")
    for job in sorted(c.jobs.values(), key=lambda j: j.id):
        if job.life.state is JobState.STOPPING:
            continue
        core, profile = c.profiles.of(job)
        for event in (Submitted(job.id, core, profile), *c.searches.told(job)):
            scheduler.take_in(event, now_s)
        _adopt_share(c, job, memory.get(str(job.id)), now_s)
        if job.life.state is JobState.PAUSED:
            scheduler.take_in(Held(job.id, True), now_s)
        c.profiles.tell_length(job)
    scheduler.plans = max(scheduler.plans, int(c.store.get("plans", 0)))


def _adopt_share(c: ControlLoop, job: LiveJob, memory: list[float] | None, now_s: float) -> None:
    view, scheduler = c.scheduler.view, c.scheduler
    row = view.row(job.id)
    view.submit_s[row] = job.life.submitted_s
    view.attained_gpu_s[row] = job.life.gpu_s
    view.generation[row] = job.generation
    if job.life.started_s is not None:
        view.first_start_s[row] = view.last_start_s[row] = job.life.started_s
    if memory:
        for name, value in zip(view.policy_columns, memory):
            view.column(name)[row] = value
    if job.target:
        view.gpus[row] = sum(job.target.values())
        if job.life.started_s is None:  # it waits for those before it to leave
            view.last_start_s[row] = now_s
        first = next(iter(job.target))
        view.gpu_type[row] = c.cluster.type_of_node[first] if first < len(c.nodes) else 0
        scheduler.placements[job.id] = tuple(sorted(job.target.items()))
    for node, gpus in job.target.items():
        if node >= len(c.nodes) or node in c.drained or gpus > c.nodes[node].gpus:
            scheduler.revoke(job.id, node, now_s)
            break


def save(c: ControlLoop) -> None:
    view = c.scheduler.view
    rows = {
        str(int(job_id)): [float(view.column(name)[i]) for name in view.policy_columns]
        for i, job_id in enumerate(view.job_ids)
    }
    try:
        state = c.scheduler.policy.state()
        with c.store.change(c.now_s()) as change:
            change.put("scheduler", {"policy": c.policy_name, "state": plain(state), "rows": rows})
            change.put("plans", c.scheduler.plans)
            change.put("ledger", c.live_ledger.state(c.now_s()))
            for job in c.jobs.values():
                if job.resize is Resize.LIVE:
                    change.update_job(job.id, progress=job.row()["progress"], stalled_s=job.stalled_s)
    except ShoalError as error:
        log.error("cannot save: %s", error)


def plain(value: Any) -> Any:
    """Numbers of numpy as those of Python, so that JSON takes them."""
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, np.generic):
        return value.item()
    return value
