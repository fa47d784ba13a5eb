"""Choose a GPU type for each share, for policies that only decide numbers of GPUs."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shoal.core.arrays import FloatArray, IntArray
from shoal.core.compiled import inlined, kernel
from shoal.core.reason import Code
from shoal.core.view import View

_FRAGMENTED = int(Code.FRAGMENTED)

#: A job moves to another type only if it becomes this many times as fast, because moving has a cost.
_WORTH_A_MOVE = 1.25


def reference_curves(view: View) -> tuple[IntArray, IntArray]:
    """The offset of each job's speed curve for its fastest GPU type, and the most GPUs that it can use there.

    Policies that only decide numbers of GPUs use these curves.
    """
    if len(view.gpu_types) == 1 or not len(view):
        return view.speed_at[0], view.max_gpus
    return _fastest(view.speeds, view.speed_at, view.type_max, view.min_gpus, view.requested_gpus)


@kernel
def _fastest(
    speeds: FloatArray, speed_at: IntArray, type_max: IntArray, least: IntArray, want: IntArray
) -> tuple[IntArray, IntArray]:
    types, n = speed_at.shape
    begin, most = np.zeros(n, np.int32), np.zeros(n, np.int32)
    for i in range(n):
        top = -1.0
        for t in range(types):
            if type_max[t, i] >= max(least[i], 1):  # otherwise it cannot run there
                speed = speeds[speed_at[t, i] + min(want[i], type_max[t, i])]
                if speed > top:
                    top = speed
                    begin[i], most[i] = speed_at[t, i], type_max[t, i]
    return begin, most


def times_as_requested(view: View, work: FloatArray) -> FloatArray:
    """The time each job needs for this work at its requested size, on its fastest type at that size."""
    return _times_as_requested(work, view.speeds, view.speed_at, view.type_max, view.requested_gpus)


@kernel
def _times_as_requested(
    work: FloatArray, speeds: FloatArray, speed_at: IntArray, type_max: IntArray, want: IntArray
) -> FloatArray:
    types, n = speed_at.shape
    times = np.empty(n)
    for i in range(n):
        speed = 0.0
        for t in range(types):
            if type_max[t, i] > 0:
                speed = max(speed, speeds[speed_at[t, i] + want[i]])
        times[i] = work[i] / speed if speed > 0 else np.inf
    return times


def give_types(
    view: View,
    shares: IntArray,
    gpus_of_type: IntArray,
    wish_gpus: IntArray,
    *,
    resize: bool,
    backfill: bool = True,
) -> tuple[IntArray, IntArray, NDArray[np.int8]]:
    """GPUs of one type for each share: (gpus, type, reason code).

    1. Running jobs stay on their type if it has enough GPUs.
    2. The other jobs, in order of submission, take the fastest type for them among those with enough GPUs. A job
       that may be resized also accepts fewer GPUs than its share; other jobs wait.
    3. GPUs that are left go to jobs that have none but fit, then to resizable jobs that would be much faster on
       another type, and finally to resizable jobs on their own type, up to their wish.
    """
    return _give_types(
        shares,
        view.gpu_type,
        view.gpus,
        view.min_gpus if resize else view.requested_gpus,
        view.speeds,
        view.speed_at,
        # Contiguous in both cases, so that the kernel is compiled once.
        np.minimum(view.type_max, wish_gpus) if resize else np.ascontiguousarray(view.type_max),
        gpus_of_type.astype(np.int64),
        resize,
        backfill,
    )


@kernel
def _give_types(
    shares: IntArray,
    type_now: IntArray,
    gpus_now: IntArray,
    need: IntArray,
    speeds: FloatArray,
    speed_at: IntArray,
    most: IntArray,
    gpus_of_type: NDArray[np.int64],
    resize: bool,
    backfill: bool,
) -> tuple[IntArray, IntArray, NDArray[np.int8]]:
    n = len(shares)
    free = gpus_of_type.copy()
    gpus = np.zeros(n, np.int32)
    chosen = np.full(n, -1, np.int32)
    codes = np.zeros(n, np.int8)
    for i in range(n):  # running jobs stay on their type if the share fits there
        t = type_now[i]
        if shares[i] > 0 and gpus_now[i] > 0 and shares[i] <= free[t]:
            if most[t, i] < (need[i] if resize else 1):
                continue  # its owner has raised its minimum above what it can use there, or a limit excludes it
            gpus[i] = min(shares[i], most[t, i]) if resize else shares[i]
            chosen[i] = t
            free[t] -= gpus[i]
    for i in range(n):
        if shares[i] > 0 and chosen[i] < 0:
            starts = _start(i, shares[i], need[i], speeds, speed_at, most, free, gpus, chosen, resize)
            codes[i] = 0 if starts else _FRAGMENTED
    if backfill:
        _start_waiting(need, speeds, speed_at, most, free, gpus, chosen, codes, resize)
    if resize:
        _move(need, speeds, speed_at, most, free, gpus, chosen)
        if backfill:
            _start_waiting(need, speeds, speed_at, most, free, gpus, chosen, codes, resize)
        for i in range(n):
            t = chosen[i]
            if t >= 0 and free[t] > 0:
                more = min(free[t], most[t, i] - gpus[i])
                if more > 0:
                    gpus[i] += more
                    free[t] -= more
    return gpus, chosen, codes


@kernel
def _start(
    i: int,
    share: int,
    need: int,
    speeds: FloatArray,
    speed_at: IntArray,
    most: IntArray,
    free: NDArray[np.int64],
    gpus: IntArray,
    chosen: IntArray,
    resize: bool,
) -> bool:
    """Place the job on the type where it is fastest with up to `share` GPUs; return whether there is one."""
    best_speed = 0.0
    for t in range(len(free)):
        take = min(share, free[t])
        if take < need or most[t, i] < (need if resize else 1):
            continue
        if not resize and speeds[speed_at[t, i] + need] == 0:
            continue  # a gang of this size cannot run there
        useful = min(take, most[t, i])
        if speeds[speed_at[t, i] + useful] > best_speed:
            best_speed = speeds[speed_at[t, i] + useful]
            chosen[i] = t
            gpus[i] = useful if resize else need  # a gang is complete, even if fewer GPUs were as fast
    if best_speed == 0.0:
        return False
    free[chosen[i]] -= gpus[i]
    return True


@kernel
def _start_waiting(
    need: IntArray,
    speeds: FloatArray,
    speed_at: IntArray,
    most: IntArray,
    free: NDArray[np.int64],
    gpus: IntArray,
    chosen: IntArray,
    codes: NDArray[np.int8],
    resize: bool,
) -> None:
    """Give jobs without a share their minimum if a type has enough free GPUs, in order of submission."""
    largest = _largest(free)
    for i in range(len(need)):
        if largest == 0:
            return
        if chosen[i] >= 0 or need[i] > largest:
            continue
        if _start(i, need[i], need[i], speeds, speed_at, most, free, gpus, chosen, resize):
            codes[i] = 0
            largest = _largest(free)


@inlined
def _largest(numbers: NDArray[np.int64]) -> int:
    most = numbers[0]
    for number in numbers:
        most = max(most, number)
    return int(most)


@kernel
def _move(
    need: IntArray,
    speeds: FloatArray,
    speed_at: IntArray,
    most: IntArray,
    free: NDArray[np.int64],
    gpus: IntArray,
    chosen: IntArray,
) -> None:
    """Move jobs to a type with free GPUs if they become fast enough there."""
    for i in range(len(need)):
        t = chosen[i]
        if t < 0:
            continue
        best, take = _WORTH_A_MOVE * speeds[speed_at[t, i] + gpus[i]], 0
        for u in range(len(free)):
            more = min(free[u], most[u, i])
            if u != t and more >= need[i] and speeds[speed_at[u, i] + more] > best:
                best, take = speeds[speed_at[u, i] + more], more
                chosen[i] = u
        if take > 0:
            free[t] += gpus[i]
            free[chosen[i]] -= take
            gpus[i] = take
