"""What a server does when it starts: read the jobs, the workers and the scheduler of the server before it.

The snapshot of the scheduler is of the last cycle. What was acknowledged after it is in the rows of the jobs, the
users and the settings. `missed_events` compares the two; its events are the input of the first cycle.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from shoal.core.cluster import Cluster
from shoal.core.events import (
    Cancelled,
    Capped,
    Event,
    Finished,
    Held,
    Measured,
    NodeBack,
    NodeLost,
    Rescaled,
    Submitted,
)
from shoal.core.job import Job
from shoal.core.limits import MONDAY_S
from shoal.core.profile import Profile
from shoal.executors.base import Executor
from shoal.placement.placer import Placer
from shoal.policies.base import Policy
from shoal.scheduler.exploration.exploration import Exploration
from shoal.scheduler.saved import restore
from shoal.scheduler.scheduler import Scheduler
from shoal.server.api.models import JobState, Resize
from shoal.server.loop import snapshot
from shoal.server.loop.dependencies import has_succeeded
from shoal.server.loop.devices import Devices
from shoal.server.loop.live_job import LEAVING, SUSPENDED, LiveJob, LiveWorker
from shoal.server.loop.node_table import NodeTable
from shoal.server.loop.people import changed_people, groups_of, users_of
from shoal.server.loop.runner import Runner
from shoal.server.store.store import Store

log = logging.getLogger("shoal.server")

#: A clock that was set by more than this makes the times in a policy's state useless.
MAX_SHIFT_S = 1.0

#: The job and its profile as decisions see them.
CoreOf = Callable[[LiveJob], tuple[Job, Profile]]
#: The limit of the autoscaler for a job, if it has one.
CapsOf = Callable[[LiveJob], Sequence[Capped]]


def make_cluster(table: NodeTable, store: Store) -> Cluster:
    # Accounts of the ledger go by position: users who were there before keep theirs.
    before = (store.get("ledger") or {}).get("state", {}).get("users", [])
    return Cluster(
        table.for_cluster,
        users_of(store, before),
        groups=groups_of(store),
    )


def restored_scheduler(
    store: Store,
    live: Mapping[int, LiveJob],
    core_of: CoreOf,
    cluster: Cluster,
    policy: Callable[[], Policy],
    placer: Callable[[Policy], Placer],
    cool_down_s: float,
    exploration: Exploration | None = None,
) -> Scheduler:
    """The scheduler of the last server's last cycle, or one made from the rows of the jobs."""
    value = store.get(snapshot.KEY)
    active = [job for job in live.values() if job.life.state is not JobState.STOPPING]
    shift_s = 0.0
    if value and value.get("format") == snapshot.FORMAT:
        saved, shift_s = snapshot.decode(value), value["shift_s"]
        found = _known(saved["ids"], live, store, core_of)
    else:
        found = {job.id: core_of(job) for job in active}
        jobs = {job_id: job for job_id, (job, _) in found.items()}
        first = policy()
        value = value if value and "rows" in value else None
        saved = snapshot.from_previous(
            value, active, jobs, cluster, int(store.get("plans", 0)), first.columns, first.name
        )
    if abs(shift_s) > MAX_SHIFT_S:
        log.warning(
            "the machine's clock was set by %.0f s; the policy starts without its saved state", shift_s
        )
        saved["policy_state"] = None

    def again() -> Scheduler:
        made = policy()
        jobs = {job_id: job for job_id, (job, _) in found.items()}
        profiles = {job_id: profile for job_id, (_, profile) in found.items()}
        return restore(
            saved, cluster, made, jobs, profiles, placer(made), cool_down_s=cool_down_s, shift_s=shift_s,
            week_begin_s=MONDAY_S, exploration=exploration,
        )  # fmt: skip

    try:
        return again()
    except Exception:
        if saved["policy_state"] is None:
            raise
        log.exception("the policy cannot continue from its saved state; it starts without")
        saved["policy_state"] = None
        return again()


def _known(
    ids: Iterable[int], live: Mapping[int, LiveJob], store: Store, core_of: CoreOf
) -> dict[int, tuple[Job, Profile]]:
    """The jobs of a snapshot, including those that have ended since."""
    found = {}
    for job_id in ids:
        job = live.get(job_id)
        if job is None:
            row = store.job(job_id)
            if row is None:
                raise LookupError(f"the saved scheduler knows job {job_id}, but the store does not")
            job = LiveJob.from_row(row, {})
        found[job_id] = core_of(job)
    return found


def missed_events(
    scheduler: Scheduler,
    live: Mapping[int, LiveJob],
    core_of: CoreOf,
    caps_of: CapsOf,
    drained: set[int],
    store: Store,
) -> list[Event]:
    """What has happened to jobs, nodes and users that the scheduler does not know yet."""
    events: list[Event] = [NodeLost(node) for node in sorted(drained - scheduler.lost_nodes)]
    events += [NodeBack(node) for node in sorted(scheduler.lost_nodes - drained)]
    events += changed_people(scheduler.cluster, store)
    ended = sorted(scheduler.jobs.keys() - live.keys())
    events += [Finished(job_id, has_succeeded(store, job_id)) for job_id in ended]
    for job in sorted(live.values(), key=lambda j: j.id):
        if job.life.state is JobState.STOPPING:
            events += [Cancelled(job.id, ended=False)] if job.id in scheduler.jobs else []
        elif job.id not in scheduler.jobs:
            core, profile = core_of(job)
            events += [Submitted(job.id, core, profile), *caps_of(job)]
            events += [Held(job.id, True)] if _is_held(job) else []
        else:
            events += _changes(scheduler, job, core_of, caps_of)
    return events


def _changes(scheduler: Scheduler, job: LiveJob, core_of: CoreOf, caps_of: CapsOf) -> list[Event]:
    """What the scheduler does not know yet of a job that it knows."""
    events: list[Event] = []
    core, profile = core_of(job)
    known = scheduler.jobs[job.id]
    if (known.gpus, known.requested_gpus) != (core.gpus, core.requested_gpus):
        low, high = core.gpus.min, core.gpus.max
        events.append(Rescaled(job.id, low, high, core.requested_gpus, profile))
    elif scheduler.profiles[job.id] is not profile:
        events.append(Measured(job.id, profile))
    events += [cap for cap in caps_of(job) if scheduler.caps.get(job.id) != cap]
    if _is_held(job) != (job.id in scheduler.held):
        events.append(Held(job.id, _is_held(job)))
    return events


def _is_held(job: LiveJob) -> bool:
    """Its owner holds it, or it failed and rests."""
    return job.life.state is JobState.PAUSED or job.again_s is not None


def read_jobs(
    store: Store, jobs: dict[int, LiveJob], nodes: NodeTable, devices: Devices, warnings: list[str]
) -> None:
    """Read the unfinished jobs of the last server and their workers."""
    for row in store.active_jobs():
        jobs[row["id"]] = LiveJob.from_row(row, nodes.indexed(row["target"]))
    for row in store.unended_workers():
        _read_worker(row, jobs.get(row["job"]), nodes, devices, warnings)


def _read_worker(
    row: Mapping[str, Any],
    job: LiveJob | None,
    nodes: NodeTable,
    devices: Devices,
    warnings: list[str],
) -> None:
    """Read a worker of the last server, and give it the GPU that it has."""
    node = nodes.find(row["node"])
    more_gpus = tuple(row["more_gpus"] or ())
    if job is None or node is None or max(row["gpu"], *more_gpus, 0) >= nodes.infos[node].gpus:
        warnings.append(f"worker {row['id']} was on a GPU that is no longer there; it is ended")
        node = None
    if job is None:
        return
    device = (node if node is not None else -1, row["gpu"])
    worker = LiveWorker(
        row["id"], device, row["node"], row["started_s"], row["rank"], row["state"], more_gpus=more_gpus
    )
    job.workers[worker.id] = worker
    worker.colocated = job.colocated and worker.state != SUSPENDED
    if node is None:
        worker.state = LEAVING
    elif worker.colocated:
        devices.colocate(device, worker.id)
    elif worker.state != SUSPENDED:
        for held in worker.devices:
            devices.give(held, worker.id)


def repeat_orders(jobs: Iterable[LiveJob], runners: Mapping[Resize, Runner], executor: Executor) -> None:
    """Repeat the orders that the last server may have been killed before giving."""
    for job in list(jobs):
        runner = runners[job.resize]
        if job.life.state is JobState.STOPPING:
            runner.cancel(job)
        elif job.ending is not None and not job.workers:
            runner.conclude_rest(job)
        for worker in list(job.workers.values()):
            if worker.state == LEAVING:
                executor.stop(worker.id)
            elif worker.state == SUSPENDED:
                executor.suspend(worker.id)
        runner.repeat_orders(job)
