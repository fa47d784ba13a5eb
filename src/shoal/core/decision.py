"""What a policy returns: a share for each job."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shoal.core.arrays import IntArray
from shoal.core.plan import Placement


@dataclass(frozen=True, slots=True)
class Decision:
    """A share for each row of the view."""

    gpus: IntArray
    #: GPU type of each share; None if the cluster has only one type.
    gpu_type: IntArray | None = None
    #: Parameter servers of each share; None: as many as workers, for jobs that use servers.
    servers: IntArray | None = None
    #: Rows that the policy places itself, for policies that bind jobs to nodes.
    placements: dict[int, Placement] | None = None
    #: When to decide again even if no event occurs, for example at the end of a quantum.
    wake_s: float = np.inf
    #: Reason codes that override the general rule; 0 for rows without one.
    codes: NDArray[np.int8] | None = None
    #: Why the policy leaves GPUs idle on purpose; None if it does not.
    idle_because: str | None = None
