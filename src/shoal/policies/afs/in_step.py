"""Jobs that go in step: what AFS hands out before a gap between gains, without a tournament.

By the rules of AFS a job beats another, whatever their lengths and whichever of them holds, if its gain as the
longer job is above the other's as the shorter one. So shares are a gap if everybody's next gain, as the shorter
job, is below all the gains that led to them, as the longer one: while somebody has not got there, each GPU goes
to one who has not, whoever it is. All get there, then, and nobody gets further before.

Jobs of one speed curve that begin with the same share are a class: at a gap they have the same share, or their
cap. Letting the class step that gains most as the longer job, time and again, leads through every gap. With few
classes this is quick and there are gaps; where every job has a curve of its own there are hardly any.
"""

from __future__ import annotations

import numpy as np

from shoal.core.arrays import FloatArray, IntArray
from shoal.core.compiled import kernel
from shoal.policies.afs.gains import gains

#: With more classes no gap is looked for: each step looks at all of them, and gaps become rare.
_CLASSES = 16
# Of a class: where its curve begins, its share, the number of its jobs and the largest of their caps.
_BEGIN, _SHARE, _JOBS, _LAST = 0, 1, 2, 3


@kernel
def hand_out_in_step(share: IntArray, speeds: FloatArray, at: IntArray, cap: IntArray, gpus: int) -> int:
    """Raise the shares to the last gap that `gpus` suffice for; returns how many GPUs are left.

    Jobs without a share, or at their cap, take no part.
    """
    class_of, classes = np.empty(len(share), np.int32), np.empty((4, _CLASSES), np.int32)
    count, width = 0, 0
    for r in range(len(share)):
        class_of[r] = -1
        if share[r] <= 0 or share[r] >= cap[r]:
            continue
        k = 0
        while k < count and (classes[_BEGIN, k] != at[r] or classes[_SHARE, k] != share[r]):
            k += 1
        if k == _CLASSES:
            return gpus
        if k == count:
            classes[_BEGIN, k], classes[_SHARE, k] = at[r], share[r]
            classes[_JOBS, k] = classes[_LAST, k] = 0
            count += 1
        class_of[r] = k
        classes[_JOBS, k] += 1
        if cap[r] > classes[_LAST, k]:
            classes[_LAST, k] = cap[r]
        if cap[r] >= width:
            width = cap[r] + 1
    if count == 0:
        return gpus
    with_cap = np.empty((count, width), np.int32)  # how many jobs of the class have this cap
    for k in range(count):
        for limit in range(width):
            with_cap[k, limit] = 0
    for r in range(len(share)):
        if class_of[r] >= 0:
            with_cap[class_of[r], cap[r]] += 1
    _to_last_gap(classes, with_cap, speeds, gpus)
    for r in range(len(share)):
        if class_of[r] >= 0:
            more = min(classes[_SHARE, class_of[r]], cap[r]) - share[r]
            share[r] += more
            gpus -= more
    return gpus


@kernel
def _to_last_gap(classes: IntArray, with_cap: IntArray, speeds: FloatArray, gpus: int) -> None:
    """Raise the classes' shares to the last gap."""
    count = len(with_cap)
    held, takers = np.empty(count, np.int32), np.empty(count, np.int32)
    short, long_ = np.empty(count), np.empty(count)
    for k in range(count):
        held[k], takers[k] = classes[_SHARE, k], classes[_JOBS, k]
        short[k], long_[k] = gains(speeds, classes[_BEGIN, k], held[k], classes[_LAST, k])
    lowest = np.inf  # of the gains that led here
    while True:
        best, highest = 0, short[0]
        for k in range(1, count):
            if short[k] > highest:
                highest = short[k]
            if long_[k] > long_[best]:
                best = k
        if lowest > highest:
            for k in range(count):
                classes[_SHARE, k] = held[k]
        gpus -= takers[best]
        if gpus < 0 or takers[best] == 0:
            return
        lowest = min(lowest, long_[best])
        held[best] += 1
        takers[best] -= with_cap[best, held[best]]
        short[best], long_[best] = gains(speeds, classes[_BEGIN, best], held[best], classes[_LAST, best])
