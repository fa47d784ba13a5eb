"""A stable argsort for kernels: `np.argsort(keys, kind="stable")`.

Numba's own takes 1.8 s to compile at the first use of a policy. This one takes a fraction of that.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shoal.core.compiled import kernel

#: Runs of this length are sorted by insertion, then merged.
_RUN = 16


@kernel
def stable_order(keys: NDArray[np.float64]) -> NDArray[np.intp]:
    """The indices of `keys`, smallest first."""
    n = len(keys)
    order, spare = np.empty(n, np.intp), np.empty(n, np.intp)
    for i in range(n):
        at, begin, key = i, i - i % _RUN, keys[i]
        while at > begin and keys[order[at - 1]] > key:
            order[at] = order[at - 1]
            at -= 1
        order[at] = i
    width = _RUN
    while width < n:
        for begin in range(0, n, 2 * width):
            middle, end = min(begin + width, n), min(begin + 2 * width, n)
            a, b = begin, middle
            for at in range(begin, end):
                if b == end or (a < middle and keys[order[a]] <= keys[order[b]]):
                    spare[at] = order[a]
                    a += 1
                else:
                    spare[at] = order[b]
                    b += 1
        order, spare = spare, order
        width *= 2
    return order
