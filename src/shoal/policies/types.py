"""From numbers of GPUs to GPUs of a type, for policies that only count."""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from shoal.core.reason import Code
from shoal.core.view import View
from shoal.policies.base import FloatArray, IntArray

_FRAGMENTED = int(Code.FRAGMENTED)

#: A job moves to another type only if it gains this much: moving is not free.
_WORTH_A_MOVE = 1.25


def reference_curves(view: View) -> IntArray:
    """Where each job's speed curve begins, for its fastest type: what counting policies reason with."""
    if len(view.gpu_types) == 1:
        return view.speed_at[0]
    return _fastest(view.speeds, view.speed_at, view.type_max, view.requested_gpus)


@njit(cache=True)
def _fastest(speeds: FloatArray, speed_at: IntArray, type_max: IntArray, want: IntArray) -> IntArray:
    types, n = speed_at.shape
    best = np.zeros(n, np.int32)
    for i in range(n):
        top = -1.0
        for t in range(types):
            if type_max[t, i] > 0:
                speed = speeds[speed_at[t, i] + min(want[i], type_max[t, i])]
                if speed > top:
                    top = speed
                    best[i] = speed_at[t, i]
    return best


def give_types(
    view: View, shares: IntArray, gpus_of_type: IntArray, *, resize: bool
) -> tuple[IntArray, IntArray, NDArray[np.int8]]:
    """GPUs of one type for each share: (gpus, type, reason code).

    Running jobs choose first and stay on their type where it still has enough GPUs; then the others, in
    order of submission, take the type that is fastest for them among those with enough. A job that may be
    resized takes what the best type has left; otherwise it waits. Of what is left over, a resizable job moves
    to another type where it would be a good deal faster; the rest goes to resizable jobs on their own type.
    """
    return _give_types(
        shares,
        view.gpu_type,
        view.gpus,
        view.min_gpus,
        view.speeds,
        view.speed_at,
        view.type_max,
        view.requested_gpus,
        gpus_of_type.astype(np.int64),
        resize,
    )


@njit(cache=True)
def _give_types(
    shares: IntArray,
    type_now: IntArray,
    gpus_now: IntArray,
    min_gpus: IntArray,
    speeds: FloatArray,
    speed_at: IntArray,
    type_max: IntArray,
    requested: IntArray,
    gpus_of_type: NDArray[np.int64],
    resize: bool,
) -> tuple[IntArray, IntArray, NDArray[np.int8]]:
    types, n = speed_at.shape
    free = gpus_of_type.copy()
    gpus = np.zeros(n, np.int32)
    chosen = np.full(n, -1, np.int32)
    codes = np.zeros(n, np.int8)
    for i in range(n):  # who runs stays where it is, if its share still fits there
        t = type_now[i]
        if shares[i] > 0 and gpus_now[i] > 0 and shares[i] <= free[t]:
            top = type_max[t, i] if resize else max(type_max[t, i], requested[i])
            gpus[i] = min(shares[i], top)
            chosen[i] = t
            free[t] -= gpus[i]
    for i in range(n):
        if shares[i] == 0 or chosen[i] >= 0:
            continue
        best_speed = 0.0
        for t in range(types):
            if type_max[t, i] == 0:
                continue
            take = min(shares[i], free[t])
            if resize:
                take = min(take, type_max[t, i])
                if take < min_gpus[i]:
                    continue
            elif take < shares[i]:
                continue
            speed = speeds[speed_at[t, i] + min(take, type_max[t, i])]
            if speed > best_speed:
                best_speed = speed
                chosen[i] = t
                gpus[i] = take
        if chosen[i] >= 0:
            free[chosen[i]] -= gpus[i]
        else:
            gpus[i] = 0
            codes[i] = _FRAGMENTED
    if resize:
        for i in range(n):  # a faster type has become free: it pays to move
            t = chosen[i]
            if t < 0:
                continue
            best, take = _WORTH_A_MOVE * speeds[speed_at[t, i] + gpus[i]], 0
            for u in range(types):
                more = min(free[u], type_max[u, i])
                if u != t and more >= min_gpus[i] and speeds[speed_at[u, i] + more] > best:
                    best, take = speeds[speed_at[u, i] + more], more
                    chosen[i] = u
            if take > 0:
                free[t] += gpus[i]
                free[chosen[i]] -= take
                gpus[i] = take
        for i in range(n):
            t = chosen[i]
            if t >= 0 and free[t] > 0:
                more = min(free[t], type_max[t, i] - gpus[i])
                if more > 0:
                    gpus[i] += more
                    free[t] -= more
    return gpus, chosen, codes
