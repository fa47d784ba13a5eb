"""What happened in a simulation, as arrays: by job, and over time."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.core.job import Job

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


@dataclass
class RunRecord:
    """Filled by the engine. Times of jobs that did not finish are nan."""

    policy: str
    jobs: tuple[Job, ...]
    total_gpus: int
    finish_s: FloatArray
    first_start_s: FloatArray
    wait_s: FloatArray
    gpu_s: FloatArray
    changes: IntArray
    #: Time that training stood still for reconfigurations.
    paused_s: FloatArray
    decisions: int = 0
    events: int = 0
    wall_s: float = 0.0
    interrupted: bool = False
    end_s: float = 0.0
    #: Over time, one entry per decision: (time, GPUs in use, jobs waiting, jobs active).
    times_s: list[float] = field(default_factory=list)
    used: list[int] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)
    active: list[int] = field(default_factory=list)
    #: Each change of a share: (time, job, GPUs).
    change_s: list[float] = field(default_factory=list)
    change_job: list[int] = field(default_factory=list)
    change_gpus: list[int] = field(default_factory=list)
    #: Which of these (by position) are a guest's coming or leaving: the GPU is its host's, and no share changes.
    guest_changes: list[int] = field(default_factory=list)
    #: The fairness ledger in samples, for plots; None with one user.
    ledger_over_time: dict[str, Any] | None = None
    #: What the policy recorded beyond shares (ledger, trades, ...), JSON-able.
    extra: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def empty(cls, policy: str, jobs: tuple[Job, ...], total_gpus: int) -> RunRecord:
        n = len(jobs)
        return cls(
            policy,
            jobs,
            total_gpus,
            finish_s=np.full(n, np.nan),
            first_start_s=np.full(n, np.nan),
            wait_s=np.zeros(n),
            gpu_s=np.zeros(n),
            changes=np.zeros(n, np.int64),
            paused_s=np.zeros(n),
        )
