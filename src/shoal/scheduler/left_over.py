"""Give GPUs that the placement could not use for the chosen jobs to other jobs that wait."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import numpy as np

from shoal.core.arrays import IntArray
from shoal.core.decision import Decision
from shoal.core.supply import Supply
from shoal.core.view import View


def give_left_over(
    view: View, decision: Decision, need: IntArray, supply: Supply, unplaced: Collection[int]
) -> Decision | None:
    """Give jobs without a share their minimum if it is left. Jobs that run now come first.

    Those in `unplaced` (by id) fit nowhere. None if nobody gets anything.
    """
    if decision.placements is not None or decision.servers is not None:
        return None  # the policy decides about placements itself, or about more than GPUs
    gpus = decision.gpus.copy()
    gpu_type = np.zeros(len(view), np.int32) if decision.gpu_type is None else decision.gpu_type.copy()
    has = gpus > 0
    given = np.bincount(gpu_type[has], weights=gpus[has], minlength=len(supply.gpus_of_type))
    free = supply.gpus_of_type - given
    out = {view.row(job_id) for job_id in unplaced}
    waiting = [row for row in np.flatnonzero(~has).tolist() if row not in out]
    for row in sorted(waiting, key=lambda row: view.gpus[row] == 0):
        want = int(need[row])
        fits = [t for t in range(len(free)) if want <= free[t] and want <= view.type_max[t, row]]
        if fits:
            t = max(fits, key=lambda t: (view.gpu_type[row] == t, view.speeds[view.speed_at[t, row] + want]))
            gpus[row], gpu_type[row] = want, t
            free[t] -= want
    if not (gpus[~has] > 0).any():
        return None
    return replace(decision, gpus=gpus, gpu_type=None if decision.gpu_type is None else gpu_type)
