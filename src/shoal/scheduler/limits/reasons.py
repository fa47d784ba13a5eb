"""Why a job may not run, or not grow: the sentence and the numbers of an obstacle."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from shoal.core.cluster import Cluster
from shoal.core.job import Job
from shoal.core.limits import WEEK_S
from shoal.core.reason import Code, Reason
from shoal.core.view import View
from shoal.core.words import counted, spoken
from shoal.scheduler.limits.admission import Admission, NotYet, Obstacle, Waits, Yields
from shoal.scheduler.limits.rooms import Bar

Evidence = dict[str, float | int | str]
_WHAT = {
    "max_gpus": ("GPU", "GPUs"),
    "max_gpus_of_type": ("GPU", "GPUs"),
    "max_running_jobs": ("running job", "running jobs"),
}


class Known(Protocol):
    """What explanations read of the scheduler."""

    view: View
    cluster: Cluster
    jobs: dict[int, Job]
    admission: Admission


def reason_of(known: Known, job_id: int, obstacle: Obstacle | None, now_s: float) -> Reason:
    """Why this job may not run, or not grow."""
    gpus = _gpus(known, job_id)
    evidence: Evidence = {"gpus": gpus, "min_gpus": known.jobs[job_id].gpus.min}
    if isinstance(obstacle, Bar):
        return _bar(known, job_id, obstacle, evidence, now_s)
    if isinstance(obstacle, NotYet):
        evidence["wait_s"] = obstacle.until_s - now_s
        text = f"its owner lets it start in {spoken(obstacle.until_s - now_s)}, not before"
        return Reason(Code.NOT_BEFORE, text, evidence)
    if isinstance(obstacle, Waits):
        return _waits(known, obstacle, evidence)
    if isinstance(obstacle, Yields):
        needs = (
            f"it has {counted(gpus, 'GPU')} and"
            if gpus
            else f"it needs {counted(obstacle.need_gpus, 'GPU')} and"
        )
        text = f"{needs} not as many are free together; other jobs under the same limit may use what is free"
        return Reason(Code.WAITING_FOR_CAPACITY, text, evidence)
    return Reason(Code.PENDING_EVALUATION, "no decision has been made since it arrived", evidence)


def _waits(known: Known, obstacle: Waits, evidence: Evidence) -> Reason:
    after = obstacle.after
    other = known.jobs.get(after.job_id)
    name = f"job {after.job_id}" if other is None else other.name
    evidence |= {"after": after.job_id, "when": after.when.value}
    if obstacle.never:
        text = f"it waits for the {after.when.value} of {name}, which ended otherwise: it can never run"
        return Reason(Code.DEPENDENCY, text, evidence)
    end = "end" if after.when.value == "any" else after.when.value
    return Reason(Code.DEPENDENCY, f"it waits for the {end} of {name}", evidence)


def _bar(known: Known, job_id: int, bar: Bar, evidence: Evidence, now_s: float) -> Reason:
    room = bar.room
    holder = {"user": f"user {room.name}", "group": f"group {room.name}", "array": "its array"}[room.kind]
    value = _value(bar, known.view)
    use = _use(known, bar)
    evidence |= {"limit": bar.limit, "limit_of": holder, "limit_value": value, "in_use": use}
    if bar.gpu_type >= 0:
        evidence["gpu_type"] = known.view.gpu_types[bar.gpu_type]
    has = f"it has {counted(int(evidence['gpus']), 'GPU')}; " if evidence["gpus"] else ""
    if bar.limit == "gpu_hours_per_week":
        frees_s = known.admission.use.week_start_s(now_s) + WEEK_S - now_s
        evidence["frees_in_s"] = frees_s
        text = f"{has}{holder} has used {use:.1f} of {value:g} GPU hours of this week"
        text += f"; the next begins in {spoken(frees_s)}"
        return Reason(Code.QUOTA_EXHAUSTED, text, evidence)
    limit = f"the limit of {holder} is {counted(int(value), *_WHAT[bar.limit])}"
    limit += f" of type {evidence['gpu_type']}" if bar.gpu_type >= 0 else ""
    if bar.alone:
        needs = "" if has else f"it needs {counted(known.jobs[job_id].gpus.min, 'GPU')}; "
        return Reason(Code.EXCEEDS_LIMIT, f"{has or needs}{limit}", evidence)
    frees = _frees(known, bar, job_id, evidence, now_s)
    return Reason(Code.QUOTA_EXHAUSTED, f"{has}{limit}, and {use:g} {_are(use)} in use; {frees}", evidence)


def _are(n: float) -> str:
    return "is" if n == 1 else "are"


def _value(bar: Bar, view: View) -> float:
    if bar.gpu_type >= 0:
        return bar.room.type_limits[bar.gpu_type]
    return float(getattr(bar.room.limits, bar.limit))


def _rows(known: Known, bar: Bar) -> list[int]:
    """The running rows that use the limit."""
    room, view = bar.room, known.view
    rows = np.flatnonzero(view.gpus > 0).tolist()
    if room.kind == "array":
        return [
            r for r in rows if (t := known.jobs[view.job_at(r)].throttle) is not None and t.key == room.name
        ]
    users = known.cluster.users
    attribute = "name" if room.kind == "user" else "group"
    return [r for r in rows if getattr(users[view.user[r]], attribute) == room.name]


def _use(known: Known, bar: Bar) -> float:
    view, room = known.view, bar.room
    if bar.limit == "gpu_hours_per_week":
        return (room.used_gpu_s or 0.0) / 3600.0
    rows = _rows(known, bar)
    if bar.limit == "max_running_jobs":
        return len(rows)
    return sum(int(view.gpus[r]) for r in rows if bar.gpu_type < 0 or view.gpu_type[r] == bar.gpu_type)


def _frees(known: Known, bar: Bar, job_id: int, evidence: Evidence, now_s: float) -> str:
    """When the limit frees up, as far as that is known."""
    view = known.view
    others = [r for r in _rows(known, bar) if view.job_at(r) != job_id]
    left = view.remaining_now(now_s)
    ends = [left[r] / view.rate[r] for r in others if view.rate[r] > 0 and np.isfinite(left[r])]
    if not ends:
        return "it frees up when another job under this limit ends or shrinks"
    evidence["frees_in_s"] = float(min(ends))
    return f"it frees up when another job under this limit ends, in about {spoken(min(ends))}"


def _gpus(known: Known, job_id: int) -> int:
    return int(known.view.gpus[known.view.row(job_id)]) if job_id in known.view else 0
