"""The gain of one more GPU in the rule of AFS, and the GPUs for which the gains alone decide."""

from __future__ import annotations

import numpy as np

from shoal.core.arrays import FloatArray, IntArray
from shoal.core.compiled import inlined, kernel

#: `hand_out_to_gap` compares all kinds of jobs for each step, so it gives up if there are more kinds than this.
_MAX_KINDS = 64


@inlined
def gains(speeds: FloatArray, at: int, gpus: int, cap: int) -> tuple[float, float]:
    """(p' - p) / p and (p' - p) / p': the gain of a job as the shorter and as the longer of two.

    p is the speed with `gpus` GPUs and p' with one more. The second gain is never the larger one. A job at
    its cap gets no further GPU: both are -inf.
    """
    if gpus >= cap:
        return -np.inf, -np.inf
    now, then = speeds[at + gpus], speeds[at + gpus + 1]
    return (then - now) / now, (then - now) / then


@kernel
def hand_out_to_gap(share: IntArray, speeds: FloatArray, at: IntArray, cap: IntArray, gpus: int) -> int:
    """Raise the shares as far as the gains alone decide who gets each GPU; return the number of GPUs left.

    By the rule of AFS, job x gets a GPU before job y, whatever their lengths, if the gain of x as the longer
    job exceeds the gain of y as the shorter one. Some shares form a gap: each GPU handed out so far had a gain
    as the longer job that exceeds every job's next gain as the shorter job. Every order of comparison
    hands out exactly these GPUs first. So this function is only a shortcut: it never changes a result.

    Jobs with the same curve, share and cap are of one kind, and have equal shares at a gap. The search raises
    the kind with the largest gain, step by step, and keeps the last gap that the GPUs suffice for.
    Jobs without a share take no part.
    """
    kind_of, kinds = np.full(len(share), -1, np.int32), 0
    example, jobs = np.empty(_MAX_KINDS, np.int32), np.zeros(_MAX_KINDS, np.int32)
    for r in range(len(share)):
        if 0 < share[r] < cap[r]:
            k = 0
            while k < kinds and not (
                at[r] == at[example[k]] and share[r] == share[example[k]] and cap[r] == cap[example[k]]
            ):
                k += 1
            if k == _MAX_KINDS:
                return gpus
            if k == kinds:
                example[k] = r
                kinds += 1
            kind_of[r] = k
            jobs[k] += 1
    held, short, long_ = np.empty(kinds, np.int32), np.empty(kinds), np.empty(kinds)
    for k in range(kinds):
        held[k] = share[example[k]]
        short[k], long_[k] = gains(speeds, at[example[k]], held[k], cap[example[k]])
    at_gap, left_at_gap, left, lowest = held.copy(), gpus, gpus, np.inf
    while kinds > 0:
        best, highest = 0, -np.inf
        for k in range(kinds):
            highest = max(highest, short[k])
            if long_[k] > long_[best]:
                best = k
        if lowest > highest:
            at_gap[:] = held
            left_at_gap = left
        left -= jobs[best]
        if left < 0 or long_[best] == -np.inf:
            break
        lowest = min(lowest, long_[best])
        held[best] += 1
        short[best], long_[best] = gains(speeds, at[example[best]], held[best], cap[example[best]])
    for r in range(len(share)):
        if kind_of[r] >= 0:
            share[r] = at_gap[kind_of[r]]
    return left_at_gap
