"""The record of a simulation as arrays, by job and over time."""

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
    """Filled by the engine. Finish times of unfinished jobs are nan."""

    policy: str
    jobs: tuple[Job, ...]
    total_gpus: int
    finish_s: FloatArray
    first_start_s: FloatArray
    wait_s: FloatArray
    gpu_s: FloatArray
    changes: IntArray
    #: Time that reconfigurations stopped training.
    paused_s: FloatArray
    decisions: int = 0
    events: int = 0
    wall_s: float = 0.0
    interrupted: bool = False
    end_s: float = 0.0
    #: One entry per decision: (time, GPUs in use, waiting jobs, active jobs).
    times_s: list[float] = field(default_factory=list)
    used: list[int] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)
    active: list[int] = field(default_factory=list)
    #: One entry per change of a share: (time, job, GPUs).
    change_s: list[float] = field(default_factory=list)
    change_job: list[int] = field(default_factory=list)
    change_gpus: list[int] = field(default_factory=list)
    #: The positions of those entries at which a co-located job joins or leaves a GPU. No share changes there.
    colocation_changes: list[int] = field(default_factory=list)
    #: Samples of the fairness ledger, for plots; None with one user.
    ledger_over_time: dict[str, Any] | None = None
    #: What the policy recorded besides shares (ledger, trades, ...), as JSON values.
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
