"""The columns of the view, and what is done to all its rows at each decision, as kernels.

They fill arrays that they are given: to hand one back to Python takes as long as a short kernel does.
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
    "total",  #: total iterations; nan when unknown
    "remaining",  #: iterations left at `settled_s`
    "rate",  #: iterations per second since `settled_s`
    "settled_s",  #: when `remaining` was true; in the future while a job is between two shares
    "first_start_s",  #: when it first got a share; inf before
    "last_start_s",  #: when it last went from no share to some; inf before
    "changed_s",  #: when its share last changed
    "attained_gpu_s",  #: GPU-seconds received up to `changed_s`
)
INTS = (
    "user",  #: index of the owner
    "min_gpus",
    "max_gpus",  #: what it can use at most: its range, its profile and the cluster
    "requested_gpus",
    "gpus",  #: its share now
    "gpu_type",  #: the type of its share now, -1 without one
    "servers",  #: parameter servers of its share now
    "is_ps",  #: 1 for parameter-server jobs
    "generation",  #: version of its set of workers
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
_SPEED_AT = len(INTS)  # where curves begin comes after these, a row for each type


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
    """A job that has just arrived and has no share; its limits are set apart."""
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
def close_up(ids: NDArray[np.int64], floats: FloatArray, ints: IntArray, row: int, n: int) -> None:
    """Of `n` rows, those behind this one move up by one."""
    behind = ids[row:n]  # loops over such slices move memory as a whole
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
    """How many GPUs these shares are together, and the first that is neither none nor within its bounds, or -1.

    The most a job can use may be less than it requested, and a policy that does not resize gives it that.
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
    """See `View.set_shares`; `changes` gets a line for each row that changes, `moved` is used up. Returns how many."""
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
    """See `View.go_on`; `ends` gets a time for each change."""
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
