"""The columns of the view, and what is done to all its rows at each decision, as kernels.

They fill arrays that they are given: to hand one back to Python takes as long as a short kernel does.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shoal.core.compiled import kernel

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int32]

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
    "memory_a",  #: what the policy remembers of the job; each policy says what it keeps here
    "memory_b",
    "memory_c",
    "memory_d",
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
_ATTAINED, _CHANGED_S, _FIRST_START_S, _LAST_START_S = (
    FLOATS.index(name) for name in ("attained_gpu_s", "changed_s", "first_start_s", "last_start_s")
)
MAX_GPUS, _GPUS, _GPU_TYPE, _SERVERS, _IS_PS, _GENERATION = (
    INTS.index(name) for name in ("max_gpus", "gpus", "gpu_type", "servers", "is_ps", "generation")
)


@kernel
def left_now(floats: FloatArray, now_s: float, left: FloatArray) -> None:
    """Iterations left at `now_s`."""
    for i in range(len(left)):
        done = floats[_RATE, i] * max(now_s - floats[_SETTLED_S, i], 0.0)
        left[i] = max(floats[_REMAINING, i] - done, 0.0)


@kernel
def rows_with_other(ints: IntArray, gpus: IntArray, rows: NDArray[np.intp]) -> int:
    """The rows whose share is another number of GPUs than this; returns how many there are."""
    count = 0
    for row in range(len(gpus)):
        if ints[_GPUS, row] != gpus[row]:
            rows[count] = row
            count += 1
    return count


@kernel
def sum_and_first_beyond(
    gpus: IntArray, least: IntArray, most: IntArray, requested: IntArray
) -> tuple[int, int]:
    """How many GPUs these shares are together, and the first that is neither none nor within its bounds, or -1.

    The most a job can use may be less than it requested, and a policy that does not resize gives it that.
    """
    given, beyond = 0, -1
    for row in range(len(gpus)):
        given += gpus[row]
        if gpus[row] != 0 and not least[row] <= gpus[row] <= max(most[row], requested[row]) and beyond < 0:
            beyond = row
    return given, beyond


#: What a change of share is called; those that release GPUs come first.
VERBS = ("pause", "shrink", "grow", "migrate", "start", "resume")
_PAUSE, _SHRINK, _GROW, _MIGRATE, _START, _RESUME = range(len(VERBS))


@kernel
def set_shares(
    floats: FloatArray,
    ints: IntArray,
    rows: NDArray[np.intp],
    gpus: IntArray,
    gpu_types: IntArray,
    servers: IntArray,
    now_s: float,
    told: NDArray[np.int64],
) -> None:
    """See `View.set_shares`; `told` gets a line for each of the rows."""
    releases, others = 0, len(rows)
    for row in rows:
        old, new = ints[_GPUS, row], gpus[row]
        if new == 0:
            verb = _PAUSE
        elif old > 0:
            verb = _SHRINK if new < old else _GROW if new > old else _MIGRATE
        else:
            verb = _RESUME if floats[_FIRST_START_S, row] <= now_s else _START
            floats[_LAST_START_S, row] = now_s
            floats[_FIRST_START_S, row] = min(floats[_FIRST_START_S, row], now_s)
        floats[_ATTAINED, row] += old * (now_s - floats[_CHANGED_S, row])
        floats[_CHANGED_S, row] = now_s
        ints[_GPUS, row] = new
        ints[_SERVERS, row] = servers[row] if len(servers) else new * ints[_IS_PS, row]
        ints[_GPU_TYPE, row] = -1 if new == 0 else gpu_types[row] if len(gpu_types) else 0
        ints[_GENERATION, row] += 1
        if verb <= _SHRINK:
            at = releases
            releases += 1
        else:  # from the end, and turned round below
            others -= 1
            at = others
        told[at, 0], told[at, 1], told[at, 2] = row, new, ints[_GPU_TYPE, row]
        told[at, 3], told[at, 4], told[at, 5] = ints[_SERVERS, row], ints[_GENERATION, row], verb
    last = len(rows) - 1
    while others < last:  # in place: to assign a slice takes seconds more to compile
        for c in range(6):
            told[others, c], told[last, c] = told[last, c], told[others, c]
        others, last = others + 1, last - 1
