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
    #: GPU type of each share; None where there is one type only.
    gpu_type: IntArray | None = None
    #: Parameter servers of each share; None: as many as workers, for jobs that have them.
    servers: IntArray | None = None
    #: Rows for which the policy itself says where, not the placement (node-bound policies).
    placements: dict[int, Placement] | None = None
    #: When to decide again though nothing happens; a quantum ends.
    wake_s: float = np.inf
    #: Reason codes where the policy knows better than the general rule; 0 elsewhere.
    codes: NDArray[np.int8] | None = None
    #: The policy leaves GPUs idle on purpose, and says why.
    idle_because: str | None = None
