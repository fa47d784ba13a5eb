"""Jobs as rows of a table, with the reason in the last column."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from shoal.cli.out import duration
from shoal.cli.times import ago

if TYPE_CHECKING:
    from shoal.server.api.models import Job, JobRef

HEAD = ["NAME", "USER", "STATE", "GPUS", "WANT", "SPEEDUP", "PROGRESS", "AGE", "REASON"]
#: Columns that a narrow terminal omits, in this order, so that the reason can be read.
SPARE = ["SPEEDUP", "PROGRESS", "USER", "AGE", "WANT"]
WIDE_HEAD = [
    "ID", "NAME", "USER", "STATE", "GPUS", "TARGET", "WANT", "SPEEDUP", "STEPS/S", "PROGRESS", "LEFT", "AGE",
    "WAITED", "RAN", "PAUSED", "STOOD STILL", "RESIZES", "CHECKPOINT", "NODES", "REASON",
]  # fmt: skip


def row(job: Job, now: datetime | None = None) -> list[str]:
    """The default columns."""
    return [
        job.name,
        job.user,
        job.state.value,
        gpus(job),
        want(job),
        speedup(job),
        f"{job.progress:.0%}" if job.progress is not None else "-",
        ago(job.submitted_at, now or datetime.now(UTC)),
        brief(reason(job)),
    ]


def speedup(job: Job) -> str:
    """Relative to one GPU; `~` marks an estimate."""
    if job.speedup is None:
        return "-"
    return f"{'' if job.speedup_measured else '~'}{job.speedup:.1f}x"


def wide_row(job: Job, now: datetime | None = None) -> list[str]:
    """The columns of `-o wide`."""
    short = row(job, now)
    return [
        str(job.id),
        *short[:4],
        str(job.target_gpus),
        *short[4:6],
        f"{job.speed:.3g}" if job.speed is not None else "-",
        short[6],
        left(job),
        short[7],
        duration(job.waiting_s),
        duration(job.running_s),
        duration(job.paused_s),
        duration(job.stalled_s),
        str(job.resizes),
        ago(job.checkpoint_at, now) + (" ago" if job.checkpoint_at else ""),
        ",".join(f"{p.node}:{'+'.join(map(str, p.gpus))}" for p in job.placement) or "-",
        short[8],
    ]


def gpus(job: Job) -> str:
    """`4xV100`, `4→2` during a reconfiguration, `-` for none, `guest` if co-located on a GPU of another job."""
    if job.guest_of is not None and job.state.value == "running":
        return "guest"
    if job.gpus != job.target_gpus and not job.state.is_final:
        return f"{job.gpus}→{job.target_gpus}"
    if not job.gpus:
        return "-"
    return f"{job.gpus}x{job.gpu_type}" if job.gpu_type else str(job.gpus)


def want(job: Job | JobRef) -> str:
    """`1..8`, `2..8:2` if it has multiples of 2, or `4`."""
    if job.min_gpus == job.max_gpus:
        return str(job.min_gpus)
    return f"{job.min_gpus}..{job.max_gpus}" + (f":{job.step_gpus}" if job.step_gpus > 1 else "")


def left(job: Job) -> str:
    """At most so long, with `~` if that is an estimate rather than steps counted by the job."""
    if job.remaining is None or job.remaining.low_s is None:
        return "-"
    low_s, high_s = job.remaining.low_s, job.remaining.high_s
    mark = "" if low_s == high_s else "~"
    return mark + duration(low_s if high_s is None else high_s)


def brief(sentence: str) -> str:
    """The sentence without the number of GPUs, which has its own column."""
    return re.sub(r"\bit has \d+ GPUs?; ", "", sentence)


def reason(job: Job) -> str:
    """Why the job has no more GPUs, or how it ended."""
    idle = f"idle for {duration(job.idle_s)}, uses no GPU; " if job.idle_s is not None else ""
    if job.reason is not None and not job.state.is_final:
        return f"{idle}{job.reason.code}: {job.reason.sentence}"
    return (idle + (job.message or "")).removesuffix("; ")
