"""The data of one run in a report: series of bounded size, and one row per job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.core.ledger import COLUMNS
from shoal.sim.costs import Costs
from shoal.sim.report.job_progress import Shares, early_jobs, progress_of, shares_of
from shoal.sim.report.time_buckets import Buckets, Steps, bucket, count_in, width_for
from shoal.sim.report.timelines import extremes, short, timelines, work_gpu_s
from shoal.sim.run_record import RunRecord
from shoal.sim.runner import Result
from shoal.sim.summary import waited_s

FloatArray = NDArray[np.float64]

MAX_CDF_POINTS = 400
#: Users with a series of their own; the others are combined.
MAX_USERS = 8
MAX_LEDGER_SAMPLES = 180
MAX_TRADES = 60

#: The parts of a setup that are files.
FILES = ("jobs", "profiles", "cluster", "needs")

FIGURES = (
    "jobs", "finished", "interrupted", "avg_jct_s", "p50_jct_s", "p95_jct_s", "p99_jct_s", "makespan_s",
    "avg_queue_s", "avg_paused_s", "utilization", "share_changes_per_job", "decisions", "wall_s",
)  # fmt: skip


def series_of(result: Result, summary: dict[str, Any]) -> dict[str, Any]:
    """The series of one run. Times are seconds since the first submission of the trace."""
    record, inputs = result.record, result.inputs
    gpu_type = inputs.cluster.gpu_types[0]
    work = work_gpu_s(record, inputs.profiles, gpu_type)
    return {
        "label": summary.get("label", record.policy),
        "policy": record.policy,
        "costs": summary.get("costs", "none"),
        "seed": summary.get("seed", 0),
        "setup": setup(summary),
        "figures": {name: summary.get(name) for name in FIGURES}
        | {"rho_max": summary["finish_time_fairness"]["max"], "deviation": worst_deviation(summary)},
        "cluster": {
            "gpus": record.total_gpus,
            "pooled": inputs.cluster.pooled,
            "types": gpus_by_type(result),
            "users": len(inputs.cluster.users),
        },
        "cdf": cdf(record),
        "over_time": over_time(record),
        "users": users(record, summary, work),
        "jobs": jobs(record, work),
        "watched": watched(result, work, gpu_type, summary.get("costs", "none")),
        "trades": trades(summary),
    }


def setup(summary: dict[str, Any]) -> dict[str, Any]:
    """The setup of a run. Files are given by name only, because reports are passed on to other machines."""
    described = summary.get("setup", {})
    return {name: Path(value).name if name in FILES else value for name, value in described.items()}


def gpus_by_type(result: Result) -> dict[str, int]:
    cluster = result.inputs.cluster
    return dict(zip(cluster.gpu_types, cluster.gpus_of_type.tolist()))


def cdf(record: RunRecord) -> dict[str, list[Any]]:
    """Points (JCT, fraction of finished jobs that took no longer): all points, or evenly spaced ones."""
    submit = np.array([job.submit_s for job in record.jobs])
    jct = np.sort((record.finish_s - submit)[np.isfinite(record.finish_s)])
    n = len(jct)
    rank = np.arange(n) if n <= MAX_CDF_POINTS else np.unique(np.linspace(0, n - 1, MAX_CDF_POINTS).round())
    rank = rank.astype(np.int64)
    return {"jct_s": short(jct[rank], 2), "part": short((rank + 1) / max(n, 1), 5)}


def origin_s(record: RunRecord) -> float:
    return min((job.submit_s for job in record.jobs), default=0.0)


def over_time(record: RunRecord) -> dict[str, Any]:
    """GPUs in use, waiting jobs and share changes, in time buckets."""
    start = origin_s(record)
    end = max(record.end_s - start, 0.0)
    times = np.asarray(record.times_s, np.float64) - start
    width = width_for(end)
    change_s = np.asarray(record.change_s, np.float64) - start
    return {
        "width_s": width,
        "end_s": end,
        "used": packed(bucket(Steps.of(times, record.used, end), width)),
        "waiting": packed(bucket(Steps.of(times, record.waiting, end), width)),
        "changes": count_in(change_s[is_change(record)], end, width).tolist(),
    }


def packed(buckets: Buckets) -> dict[str, list[Any]]:
    return {
        "mean": short(buckets.mean, 2),
        "low": short(buckets.low, 2),
        "high": short(buckets.high, 2),
    }


def is_change(record: RunRecord) -> NDArray[np.bool_]:
    """Which entries of the change log change a share: not the end of a job, and not those of co-located jobs."""
    job = np.asarray(record.change_job, np.int64)
    at, gpus = np.asarray(record.change_s, np.float64), np.asarray(record.change_gpus, np.int64)
    changes: NDArray[np.bool_] = (gpus > 0) | (at != record.finish_s[job])
    changes[record.colocation_changes] = False
    return changes


def jobs(record: RunRecord, work: FloatArray) -> dict[str, Any]:
    """Every job, and its share over time."""
    submit = np.array([job.submit_s for job in record.jobs])
    return {
        "name": [job.name for job in record.jobs],
        "user": [job.user for job in record.jobs],
        "model": [job.model for job in record.jobs],
        "requested": np.array([job.requested_gpus for job in record.jobs]),
        "submit_s": submit - origin_s(record),
        "work_gpu_s": work,
        "jct_s": record.finish_s - submit,
        "wait_s": waited_s(record),
        "changes": record.changes,
        **timelines(record),
    }


def watched(result: Result, work: FloatArray, gpu_type: str, kind: str) -> list[dict[str, Any]]:
    """The progress of early jobs, of which the page shows one (as in CoDDL's thrashing experiment)."""
    which = early_jobs(result.record, work)
    shares = shares_of(result.record, which)
    return [watched_one(result, j, mine, gpu_type, kind) for j, mine in zip(which, shares)]


def watched_one(result: Result, j: int, shares: Shares, gpu_type: str, kind: str) -> dict[str, Any]:
    record = result.record
    job = record.jobs[j]
    costs = costs_of(shares, float(record.paused_s[j]), kind)
    curve = progress_of(record, j, shares, result.inputs.profiles[job.model], gpu_type, costs)
    keep = extremes(curve.time_s, curve.done, 400)
    return {
        "job": job.name,
        "model": job.model,
        "submit_s": job.submit_s - origin_s(record),
        "jct_s": short([record.finish_s[j] - job.submit_s])[0],
        "changes": int(record.changes[j]),
        "paused_s": float(record.paused_s[j]),
        "time_s": short(curve.time_s[keep]),
        "done": short(curve.done[keep], 5),
    }


def costs_of(shares: Shares, paused_s: float, kind: Any) -> Costs:
    """The cost model of a run, with the job's mean cost per reconfiguration."""
    paid = int((shares.gpus[1:] > 0).sum())
    return Costs(kind, restart_s=paused_s / paid if paid else 0.0)


def worst_deviation(summary: dict[str, Any]) -> float | None:
    """The largest |received - due| / due of a user over the whole run."""
    found = [abs(u["deviation"]) for u in summary.get("ledger", {}).values() if u["deviation"] is not None]
    return max(found, default=None)


def users(record: RunRecord, summary: dict[str, Any], work: FloatArray) -> dict[str, Any] | None:
    """The fairness ledger: totals by user and GPU type, and mean GPUs over time of the busiest users."""
    ledger, samples = summary.get("ledger"), record.ledger_over_time
    if not ledger or samples is None:
        return None
    asked = dict.fromkeys(ledger, 0.0)
    for job, gpu_s in zip(record.jobs, work.tolist()):
        asked[job.user] = asked.get(job.user, 0.0) + gpu_s
    names = sorted(ledger, key=lambda user: (-asked[user], user))
    shown = names if len(names) <= MAX_USERS else names[: MAX_USERS - 1]
    times = np.asarray(samples["time_s"], np.float64) - origin_s(record)
    from_start = times > 0
    step = max(-(-int(from_start.sum()) // MAX_LEDGER_SAMPLES), 1)
    gpus = {
        user: {c: np.asarray(samples["gpus"][user][c])[from_start] for c in COLUMNS}
        for user in samples["gpus"]
    }
    over = {user: {c: short(_means(gpus[user][c], step), 2) for c in COLUMNS} for user in shown}
    rest = [user for user in names if user not in over]
    if rest:
        over[f"{len(rest)} others"] = {
            c: short(_means(np.sum([gpus[user][c] for user in rest], axis=0), step), 2) for c in COLUMNS
        }
    return {
        "totals": [{"user": user, **ledger[user]} for user in names],
        "time_s": short(_ends(times[from_start], step)),
        "names": list(over),
        "gpus": list(over.values()),
    }


def _means(values: FloatArray, step: int) -> FloatArray:
    """Means of `step` neighbours; the last mean may have fewer."""
    if step == 1 or not len(values):
        return values
    starts = np.arange(0, len(values), step)
    out: FloatArray = np.add.reduceat(values, starts) / np.diff(np.append(starts, len(values)))
    return out


def _ends(times: FloatArray, step: int) -> FloatArray:
    last = np.minimum(np.arange(step - 1, len(times) + step - 1, step), len(times) - 1)
    return times[last] if len(times) else times


def trades(summary: dict[str, Any]) -> dict[str, Any] | None:
    """The trades of a run by round; the last rounds if there are many."""
    rounds = summary.get("trades")
    if not rounds:
        return None
    flat = [{"time_s": r["time_s"], **trade} for r in rounds for trade in r["trades"]]
    return {"count": len(flat), "items": flat[-MAX_TRADES:]}
