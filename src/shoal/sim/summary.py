"""The figures of a simulation that `shoal sim run -o json` prints."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.core.profile import Profile
from shoal.sim.run_record import RunRecord

FloatArray = NDArray[np.float64]


def percentile(values: FloatArray, q: float) -> float:
    """The `q`-th percentile without interpolation (the next larger value), as the AFS authors compute it."""
    return float(np.percentile(values, q, method="higher")) if len(values) else float("nan")


def ideal_s(record: RunRecord, profiles: dict[str, Profile], gpu_type: str) -> FloatArray:
    """T_ideal of finish-time fairness: a job's total GPU time over min(M / mean active jobs, its request)."""
    active = np.array(record.active, np.float64)
    times = np.array(record.times_s)
    if len(times) > 1 and times[-1] > times[0]:
        contention = max(float(np.average(active[:-1], weights=np.diff(times))), 1e-9)
    else:
        contention = max(float(active.max(initial=1)), 1.0)
    fair_gpus = record.total_gpus / contention
    out = np.empty(len(record.jobs))
    for i, job in enumerate(record.jobs):
        profile = profiles[job.model]
        kind = gpu_type if profile.knows(gpu_type) else profile.gpu_types[0]
        speed = profile.curve(kind).speed
        want = min(job.requested_gpus, len(speed) - 1)
        alone_s = (job.iterations or np.nan) / speed[want]
        out[i] = alone_s * want / min(fair_gpus, want)
    return out


def summary(record: RunRecord, profiles: dict[str, Profile], gpu_type: str) -> dict[str, Any]:
    """All figures of a run, as plain data with stable names."""
    submit = np.array([job.submit_s for job in record.jobs])
    done = np.isfinite(record.finish_s)
    jct = (record.finish_s - submit)[done]
    rho = (jct / ideal_s(record, profiles, gpu_type)[done]) if len(jct) else np.array([])
    begin = float(submit.min()) if len(submit) else 0.0
    end = float(record.finish_s[done].max()) if len(jct) else begin
    if record.interrupted:
        end = max(record.end_s, begin)  # the end of an interrupted run
    span = max(end - begin, 1e-9)
    by_user: dict[str, float] = {}
    for job, gpu_s in zip(record.jobs, record.gpu_s.tolist()):
        by_user[job.user] = by_user.get(job.user, 0.0) + gpu_s

    def mean(values: FloatArray) -> float | None:
        return float(values.mean()) if len(values) else None

    def at(values: FloatArray, q: float) -> float | None:
        return percentile(values, q) if len(values) else None

    return {
        "policy": record.policy,
        "jobs": len(record.jobs),
        "finished": int(done.sum()),
        "interrupted": record.interrupted,
        "avg_jct_s": mean(jct),
        "p50_jct_s": at(jct, 50),
        "p95_jct_s": at(jct, 95),
        "p99_jct_s": at(jct, 99),
        "makespan_s": None if record.interrupted else end - begin,
        "simulated_s": end - begin,
        "avg_queue_s": mean(record.wait_s[done]),
        "avg_paused_s": mean(record.paused_s[done]),
        "utilization": float(record.gpu_s.sum() / (record.total_gpus * span)),
        "share_changes_per_job": mean(record.changes[done].astype(np.float64)),
        "finish_time_fairness": {
            "max": at(rho, 100),
            "mean": mean(rho),
            "p50": at(rho, 50),
            "p95": at(rho, 95),
            "p99": at(rho, 99),
            "deciles": [at(rho, q) for q in range(0, 101, 10)],
            "above_1": float((rho > 1).mean()) if len(rho) else None,
        },
        "gpu_seconds_by_user": dict(sorted(by_user.items())),
        "decisions": record.decisions,
        "events": record.events,
        "wall_s": record.wall_s,
        "peak_memory_mb": None,
        **record.extra,
    }


def waited_s(record: RunRecord) -> FloatArray:
    """Time without GPUs, up to the end of the run for jobs that still wait; nan for jobs not submitted by then.

    The record adds a wait only when it is over.
    """
    submit = np.array([job.submit_s for job in record.jobs])
    last_s, last_gpus = submit.copy(), np.isfinite(record.first_start_s).astype(np.int64)
    which, from_back = np.unique(np.asarray(record.change_job, np.int64)[::-1], return_index=True)
    entry = len(record.change_job) - 1 - from_back  # the last entry of each job: entries are in order of time
    last_s[which] = np.asarray(record.change_s, np.float64)[entry]
    last_gpus[which] = np.asarray(record.change_gpus, np.int64)[entry]
    out = record.wait_s.copy()
    waits = np.isnan(record.finish_s) & (last_gpus == 0)
    out[waits] += record.end_s - last_s[waits]
    out[np.isnan(record.finish_s) & (submit > record.end_s)] = np.nan
    return out


def per_job_rows(record: RunRecord) -> dict[str, Any]:
    """One row per job, as columns; unknown values are nan."""
    submit = np.array([job.submit_s for job in record.jobs])
    return {
        "job": [job.name for job in record.jobs],
        "user": [job.user for job in record.jobs],
        "model": [job.model for job in record.jobs],
        "requested_gpus": [job.requested_gpus for job in record.jobs],
        "submit_s": submit,
        "first_start_s": record.first_start_s,
        "finish_s": record.finish_s,
        "jct_s": record.finish_s - submit,
        "queue_s": waited_s(record),
        "paused_s": record.paused_s,
        "gpu_s": record.gpu_s,
        "share_changes": record.changes,
    }
