"""AFS-P without a tournament: where the unknown lengths would decide, the larger gain does.

Who wins whatever the lengths (F2 <= F1 of the other, see `afs_p`) has the larger gain p' / p, too. So this is an order,
no fold is needed, and each GPU goes to the largest gain, the first of equals: quick whatever the speed curves.
"""

from __future__ import annotations

import numpy as np

from shoal.core.compiled import borrower, kernel
from shoal.policies.base import FloatArray, IntArray
from shoal.policies.candidates import SHORT, lift_gains, plant, set_job, those_of, with_largest


@kernel
def hand_out_to_largest(
    share: IntArray, rows: IntArray, speeds: FloatArray, at: IntArray, cap: IntArray, gpus: int
) -> None:
    """Hand out `gpus` one by one among `rows`, which all have a share."""
    n = len(rows)
    held, limit, begin, need = those_of(share, rows, at, cap)
    if need <= gpus:
        for i in range(n):
            share[rows[i]] = max(held[i], limit[i])
        return
    columns, begins = plant(held, limit, np.zeros(n), speeds, begin)
    _hand_out(columns, begins, held, limit, begin, speeds, gpus)
    for i in range(n):
        share[rows[i]] = held[i]


@borrower
def _hand_out(
    columns: FloatArray,
    begins: IntArray,
    held: IntArray,
    limit: IntArray,
    begin: IntArray,
    speeds: FloatArray,
    gpus: int,
) -> None:
    while gpus > 0:
        best = with_largest(columns, begins, SHORT)
        held[best] += 1
        gpus -= 1
        set_job(columns, best, held[best], limit[best], 0.0, speeds, begin[best])
        lift_gains(columns, begins, best)
