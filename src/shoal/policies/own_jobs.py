"""Priorities in the order of a policy: a user's jobs trade places with each other, never with those of others."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shoal.core.arrays import IntArray


def by_priority(order: NDArray[np.int64], user: IntArray, priority: IntArray) -> NDArray[np.int64]:
    """The order in which each user's rows take that user's places by priority. Equal priorities keep their order."""
    if not priority.any():
        return order
    found = order.copy()
    for each in np.unique(user[priority != 0]).tolist():
        places = np.flatnonzero(user[order] == each)
        rows = order[places]
        found[places] = rows[np.argsort(-priority[rows], kind="stable")]
    return found
