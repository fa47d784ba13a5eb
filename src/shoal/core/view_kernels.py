"""The columns of the view, and the kernels that update its rows at each decision.

The kernels fill arrays of the caller, because returning a new array to Python takes as long as a short kernel.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shoal.core.arrays import FloatArray, IntArray
from shoal.core.compiled import kernel
from shoal.core.plan import (
    GENERATION,
    GPUS,
    GROW,
    JOB,
    MIGRATE,
    PAUSE,
    RESUME,
    ROW,
    SERVERS,
    SHRINK,
    START,
    TYPE,
    VERB,
)

FLOATS = (
    "submit_s",  #: when the job arrived
    "weight",  #: the owner's weight among their own jobs
    "total",  #: total iterations; nan if unknown
    "remaining",  #: iterations left at `settled_s`
    "rate",  #: iterations per second since `settled_s`
    "settled_s",  #: the time of `remaining`; in the future while a job is reconfigured
    "first_start_s",  #: when it first got a share; inf before
    "last_start_s",  #: when it last started or resumed; inf before
    "changed_s",  #: when its share last changed
    "attained_gpu_s",  #: GPU-seconds received up to `changed_s`
)
INTS = (
    "user",  #: index of the owner
    "min_gpus",
    "max_gpus",  #: the most it can use, by its range, its profile and the cluster
    "requested_gpus",
    "gpus",  #: its current share
    "gpu_type",  #: the GPU type of its current share; -1 without one
    "servers",  #: the parameter servers of its current share
    "is_ps",  #: 1 for parameter-server jobs
    "generation",  #: version of its set of workers
    "priority",  #: among its owner's jobs, higher ones come first
    "step_gpus",  #: its shares are multiples of this
)


_REMAINING, _RATE, _SETTLED_S = (FLOATS.index(name) for name in ("remaining", "rate", "settled_s"))
_SUBMIT_S, _WEIGHT, _TOTAL = (FLOATS.index(name) for name in ("submit_s", "weight", "total"))
_ATTAINED, _CHANGED_S, _FIRST_START_S, _LAST_START_S = (
    FLOATS.index(name) for name in ("attained_gpu_s", "changed_s", "first_start_s", "last_start_s")
)
_USER, _MIN_GPUS, MAX_GPUS, _REQUESTED_GPUS = (
    INTS.index(name) for name in ("user", "min_gpus", "max_gpus", "requested_gpus")
)
_GPUS, _GPU_TYPE, _SERVERS, _IS_PS, _GENERATION = (
    INTS.index(name) for name in ("gpus", "gpu_type", "servers", "is_ps", "generation")
)
_SPEED_AT = len(INTS)  # the rows of `View.speed_at`, one per GPU type, follow these


@kernel
def fill_row(
    floats: FloatArray,
    ints: IntArray,
    row: int,
    submit_s: float,
    weight: float,
    work: float,
    user: int,
    min_gpus: int,
    requested_gpus: int,
    is_ps: bool,
    now_s: float,
) -> None:
    """Fill the row of a job that has just arrived. `View.set_profile` sets its limits."""
    for column in range(len(floats)):
        floats[column, row] = 0.0
    for column in range(len(ints)):
        ints[column, row] = 0
    floats[_SUBMIT_S, row], floats[_WEIGHT, row] = submit_s, weight
    floats[_TOTAL, row], floats[_REMAINING, row] = work, work
    floats[_SETTLED_S, row], floats[_CHANGED_S, row] = now_s, now_s
    floats[_FIRST_START_S, row], floats[_LAST_START_S, row] = np.inf, np.inf
    ints[_USER, row], ints[_IS_PS, row], ints[_GPU_TYPE, row] = user, is_ps, -1
    ints[_MIN_GPUS, row], ints[_REQUESTED_GPUS, row] = min_gpus, requested_gpus


@kernel
def remove_row(ids: NDArray[np.int64], floats: FloatArray, ints: IntArray, row: int, n: int) -> None:
    """Remove one of `n` rows: the rows behind it move up by one."""
    behind = ids[row:n]  # a loop over a slice compiles to one move of memory
    for i in range(len(behind) - 1):
        behind[i] = behind[i + 1]
    for column in range(len(floats)):
        values = floats[column, row:n]
        for i in range(len(values) - 1):
            values[i] = values[i + 1]
    for column in range(len(ints)):
        numbers = ints[column, row:n]
        for i in range(len(numbers) - 1):
            numbers[i] = numbers[i + 1]


@kernel
def left_now(floats: FloatArray, now_s: float, left: FloatArray) -> None:
    """Iterations left at `now_s`."""
    for i in range(len(left)):
        done = floats[_RATE, i] * max(now_s - floats[_SETTLED_S, i], 0.0)
        left[i] = max(floats[_REMAINING, i] - done, 0.0)


@kernel
def sum_and_first_beyond(ints: IntArray, gpus: IntArray) -> tuple[int, int]:
    """The sum of these shares, and the first row whose share is neither 0 nor within its bounds, or -1.

    A policy that does not resize gives a job its requested size, which may exceed the most that it can use.
    """
    given, beyond = 0, -1
    for row in range(len(gpus)):
        given += gpus[row]
        if gpus[row] != 0 and beyond < 0:
            most = max(ints[MAX_GPUS, row], ints[_REQUESTED_GPUS, row])
            if not ints[_MIN_GPUS, row] <= gpus[row] <= most:
                beyond = row
    return given, beyond


@kernel
def set_shares(
    floats: FloatArray,
    ints: IntArray,
    ids: NDArray[np.int64],
    gpus: IntArray,
    gpu_types: IntArray,
    servers: IntArray,
    moved: NDArray[np.bool_],
    now_s: float,
    changes: NDArray[np.int64],
) -> int:
    """See `View.set_shares`. Write each change to `changes`, clear `moved`, and return the number of changes."""
    count = 0
    for releases in (True, False):
        for row in range(len(gpus)):
            old, new = ints[_GPUS, row], gpus[row]
            kind = -1 if new == 0 else gpu_types[row] if len(gpu_types) else 0
            ps = servers[row] if len(servers) else new * ints[_IS_PS, row]
            shifted = len(moved) > 0 and moved[row]
            if new == old and not shifted:
                retyped = len(gpu_types) > 0 and kind != ints[_GPU_TYPE, row]
                if not retyped and (len(servers) == 0 or ps == ints[_SERVERS, row]):
                    continue
            if releases != (new < old):
                continue
            if new == 0:
                verb = PAUSE
            elif old > 0:
                verb = SHRINK if new < old else GROW if new > old else MIGRATE
            else:
                verb = RESUME if floats[_FIRST_START_S, row] <= now_s else START
                floats[_LAST_START_S, row] = now_s
                floats[_FIRST_START_S, row] = min(floats[_FIRST_START_S, row], now_s)
            floats[_ATTAINED, row] += old * (now_s - floats[_CHANGED_S, row])
            floats[_CHANGED_S, row] = now_s
            ints[_GPUS, row], ints[_GPU_TYPE, row], ints[_SERVERS, row] = new, kind, ps
            ints[_GENERATION, row] += 1
            if shifted:
                moved[row] = False
            changes[count, ROW], changes[count, JOB] = row, ids[row]
            changes[count, GPUS], changes[count, TYPE], changes[count, SERVERS] = new, kind, ps
            changes[count, GENERATION], changes[count, VERB] = ints[_GENERATION, row], verb
            count += 1
    return count


@kernel
def go_on(
    floats: FloatArray,
    ints: IntArray,
    speeds: FloatArray,
    changes: NDArray[np.int64],
    now_s: float,
    ends: FloatArray,
) -> None:
    """See `View.go_on`. Write the end of each changed row to `ends`."""
    for i in range(len(changes)):
        row, gpus = changes[i, ROW], changes[i, GPUS]
        if row < 0:  # the job is held and has no row
            ends[i] = np.inf
            continue
        done = floats[_RATE, row] * max(now_s - floats[_SETTLED_S, row], 0.0)
        left = max(floats[_REMAINING, row] - done, 0.0)
        rate = speeds[ints[_SPEED_AT + changes[i, TYPE], row] + gpus] if gpus > 0 else 0.0
        floats[_REMAINING, row], floats[_RATE, row], floats[_SETTLED_S, row] = left, rate, now_s
        ends[i] = now_s + left / rate if rate > 0 else np.inf
