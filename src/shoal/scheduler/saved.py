"""Save a scheduler as plain data and restore it. The restored scheduler makes the same decisions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shoal.core.cluster import Cluster, Group, User
from shoal.core.events import Capped
from shoal.core.job import After, GpuRange, Job, When
from shoal.core.limits import Limits
from shoal.core.plan import Cause, CauseKind, Placement
from shoal.core.profile import Profile
from shoal.core.view_kernels import FLOATS, INTS
from shoal.placement.placer import Placer
from shoal.policies.base import Policy
from shoal.scheduler.difference import Before
from shoal.scheduler.scheduler import Scheduler

if TYPE_CHECKING:
    from shoal.scheduler.exploration.exploration import Exploration

#: Columns of the view that are points in time; `shift_s` moves them.
_TIMES = ("settled_s", "first_start_s", "last_start_s", "changed_s")


def save(scheduler: Scheduler) -> dict[str, Any]:
    """All state that the next decision depends on, besides the jobs, their profiles and the cluster.

    `columns` has one value per job of `ids`; jobs that are held come last.
    """
    view, held = scheduler.view, scheduler.held
    barred = scheduler.admission.barred
    rows = [row for row, job_id in enumerate(view.job_ids.tolist()) if job_id in scheduler.jobs]
    ids = [*view.job_ids[rows].tolist(), *held, *barred]
    ranges = [scheduler.jobs[job_id] for job_id in ids]
    return {
        "policy": scheduler.policy.name,
        "policy_state": scheduler.policy.state(),
        "users": [[user.name, user.tickets] for user in scheduler.cluster.users],
        "nodes": [node.name for node in scheduler.cluster.nodes],
        "gpu_types": list(scheduler.cluster.gpu_types),
        "ids": ids,
        "ranges": [
            [job.gpus.min, job.gpus.max, job.requested_gpus] for job in ranges
        ],  # the step never changes
        "columns": view.columns(rows, [*held.values(), *barred.values()]),
        "held": list(held),
        "barred": list(barred),
        "never": {i: [after.job_id, after.when.value] for i, after in scheduler.admission.never.items()},
        "after": {
            i: [[a.job_id, a.when.value] for a in scheduler.jobs[i].after]
            for i in ids
            if scheduler.jobs[i].after
        },
        "use": scheduler.admission.use.state(),
        "people": _dump_people(scheduler.cluster),
        "placements": {i: [list(p) for p in where] for i, where in scheduler.placements.items()},
        "caps": {i: [cap.gpus, cap.why] for i, cap in scheduler.caps.items()},
        "lost_nodes": sorted(scheduler.lost_nodes),
        "plans": scheduler.plans,
        "events_seen": scheduler.events_seen,
        "unplanned": {i: _dump_before(before) for i, before in scheduler.unplanned.items()},
        "exploration": None if scheduler.exploration is None else scheduler.exploration.state(),
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
    shift_s: float = 0.0,
    week_begin_s: float | None = None,
    exploration: Exploration | None = None,
) -> Scheduler:
    """The scheduler that was saved. `jobs` and `profiles` contain all its jobs; keys of `saved` may be strings.

    The cluster may have changed: a job whose GPUs no longer exist loses its share, and the next plan contains the
    command. Another policy starts without a state of its own. `shift_s` is added to all times. A new `exploration`
    continues from the saved state.
    """
    scheduler = Scheduler(
        _with_users(cluster, saved["users"], saved.get("people")),
        policy,
        placer,
        cool_down_s=cool_down_s,
        week_begin_s=week_begin_s,
        exploration=exploration,
    )
    if exploration is not None and saved.get("exploration"):
        exploration.restore(saved["exploration"], saved["gpu_types"], cluster.gpu_types, shift_s)
    if "use" in saved:
        scheduler.admission.use.restore(saved["use"], shift_s)
    view, cluster = scheduler.view, scheduler.cluster
    types = {i: _index(cluster.gpu_types, name) for i, name in enumerate(saved["gpu_types"])} | {-1: -1}
    names = [node.name for node in cluster.nodes]
    nodes = [_index(names, name) for name in saved["nodes"]]
    rows = {job_id: row for row, job_id in enumerate(saved["ids"])}
    columns = saved["columns"]
    if saved["policy"] != policy.name:
        columns = {name: columns[name] for name in (*FLOATS, *INTS) if name in columns}
    for job_id in sorted(rows):
        low, high, requested = saved["ranges"][rows[job_id]]
        after = _load_after(saved.get("after", {}), job_id)
        gpus = GpuRange(low, high, jobs[job_id].gpus.step)
        job = replace(jobs[job_id], gpus=gpus, requested_gpus=requested, after=after)
        scheduler.jobs[job_id], scheduler.profiles[job_id] = job, profiles[job_id]
        scheduler.note_conditions(job_id)
        user = scheduler.user_index(job.user)
        row = view.add(job_id, job, profiles[job_id], user, job.submit_s)
        values = {name: column[rows[job_id]] for name, column in columns.items()}
        values |= {name: values[name] + shift_s for name in _TIMES if shift_s and values[name] is not None}
        gpu_type = types[values["gpu_type"]]
        view.load(row, values | {"user": user, "gpu_type": 0 if gpu_type is None else gpu_type})
    scheduler.placements = {
        int(i): _moved(where, nodes) for i, where in saved["placements"].items() if int(i) in view
    }
    for i, (gpus, why) in saved["caps"].items():
        scheduler.caps[int(i)] = Capped(int(i), gpus, why)
    for job_id in rows:
        scheduler.update_limits(job_id)
    for job_id in saved["held"]:
        scheduler.held[job_id] = view.park(job_id)
    for job_id in saved.get("barred", ()):
        scheduler.admission.take_out(scheduler, job_id)
    for i, (other, when) in saved.get("never", {}).items():
        scheduler.admission.never[int(i)] = After(other, When(when))
    scheduler.lose_nodes(node for i in saved["lost_nodes"] if (node := nodes[i]) is not None)
    scheduler.unplanned = {int(i): _load_before(before) for i, before in saved["unplanned"].items()}
    scheduler.continue_from(saved["plans"], saved["events_seen"])
    if saved["policy"] == policy.name and saved["policy_state"] is not None:
        policy.restore(saved["policy_state"])
    gone = {i for i, gpu_type in types.items() if gpu_type is None}
    lost = {job_id for job_id in rows if saved["columns"]["gpu_type"][rows[job_id]] in gone}
    lost |= {int(i) for i, where in saved["placements"].items() if any(nodes[n] is None for n, _ in where)}
    _revoke_missing(scheduler, lost)
    return scheduler


def _with_users(cluster: Cluster, saved: list[list[Any]], people: Mapping[str, Any] | None) -> Cluster:
    """Users go by position in policies and accounts, so those who were there before keep their place."""
    names = {name for name, _ in saved}
    others = [user for user in cluster.users if user.name not in names]
    people = people or {"users": {}, "groups": []}
    users = []
    for name, tickets in saved:
        group, limits = people["users"].get(name, ["", {}])
        users.append(User(name, tickets, Limits.from_plain(limits), group))
    groups = [Group(name, tickets, Limits.from_plain(limits)) for name, tickets, limits in people["groups"]]
    return replace(cluster, users=(*users, *others), groups=tuple(groups) or cluster.groups)


def _dump_people(cluster: Cluster) -> dict[str, Any]:
    """Groups, and the users that have a group or limits."""
    return {
        "users": {u.name: [u.group, u.limits.plain()] for u in cluster.users if u.group or u.limits},
        "groups": [[g.name, g.tickets, g.limits.plain()] for g in cluster.groups],
    }


def _load_after(saved: Mapping[Any, Any], job_id: int) -> tuple[After, ...]:
    """The jobs that a job still waits for. Keys are strings after JSON."""
    found = saved.get(job_id, saved.get(str(job_id), ()))
    return tuple(After(other, When(when)) for other, when in found)


def _index(names: Any, name: str) -> int | None:
    return names.index(name) if name in names else None


def _moved(where: Any, nodes: list[int | None]) -> Placement:
    """A placement on the nodes of the new cluster; parts on nodes that are gone are left out."""
    return tuple(sorted((node, int(gpus)) for n, gpus in where if (node := nodes[n]) is not None))


def _revoke_missing(scheduler: Scheduler, lost: set[int]) -> None:
    """Set the share of every job whose GPUs the cluster no longer has to zero."""
    view, cluster = scheduler.view, scheduler.cluster
    free, free_of_type = cluster.gpus_of_node.copy(), cluster.gpus_of_type.copy()
    for row, job_id in enumerate(view.job_ids.tolist()):
        gpus, where = int(view.gpus[row]), scheduler.placements.get(job_id, ())
        fits = job_id not in lost and all(count <= free[node] for node, count in where)
        if gpus and fits and gpus <= free_of_type[view.gpu_type[row]]:
            free_of_type[view.gpu_type[row]] -= gpus
            for node, count in where:
                free[node] -= count
        elif gpus:
            scheduler.revoke(job_id, None, max(float(view.changed_s[row]), float(view.settled_s[row])))


def _dump_before(before: Before) -> list[Any]:
    cause = before.cause
    return [
        before.gpus, before.gpu_type, before.servers, [list(part) for part in before.placement],
        cause.kind.value, cause.event, cause.node,
    ]  # fmt: skip


def _load_before(saved: list[Any]) -> Before:
    gpus, gpu_type, servers, placement, kind, event, node = saved
    where = tuple((int(n), int(g)) for n, g in placement)
    return Before(gpus, gpu_type, servers, where, Cause(CauseKind(kind), event, node))
