"""The tournament of AFS-L while jobs without a share take part, some of which would double by their next GPU.

A job without a share is infinitely long and gains all there is, so by the rule
- it beats a job with a share whose next GPU does not double its speed, whatever else,
- it loses to one whose next GPU does (here: a doubler),
- of two of its kind the one that is shorter at its first GPUs wins, the later of equals.
Among jobs with shares the rule is that of `tournament`. So the fold is walked in jumps: from a job without a
share to the next doubler, and from a job with one to the next that beats it or, if it is no doubler, to the
next without one. Where no doubler follows, the shortest of those without a share wins.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shoal.core.arrays import FloatArray, IntArray
from shoal.core.compiled import borrower, inlined, kernel
from shoal.core.stable_order import stable_order
from shoal.policies.afs.candidates import SHORT, lift, next_to_beat, plant, set_job

BoolArray = NDArray[np.bool_]
#: The candidates, who waits how long, who doubles and how many by stride, who needs most, and room for the holders.
_Arrays = tuple[FloatArray, IntArray, FloatArray, BoolArray, NDArray[np.int64], IntArray, IntArray]

#: The start time of jobs that never end: last, but there.
_LAST = 1e300
#: A doubler gains at least half of its new speed: who beats it gains as much, and is shorter (see `tournament`).
_BAR = 0.5
#: Doublers are counted by so many jobs, and all that have none are passed over at once.
_STRIDE = 64


@kernel
def hand_out_from_zero(
    share: IntArray,
    remaining: FloatArray,
    speeds: FloatArray,
    at: IntArray,
    min_gpus: IntArray,
    cap: IntArray,
    gpus: int,
) -> int:
    """Hand out GPUs until nobody is left that could still start; returns how many are left then."""
    n = len(share)
    size = 1
    while size < n:
        size *= 2
    columns, begins = plant(cap, cap, remaining, speeds, at, False)  # no one has a share
    wait = np.full(2 * size, np.inf)
    for j in range(n):
        time = remaining[j] / speeds[at[j] + min_gpus[j]]
        wait[size + j] = time if time < _LAST else _LAST
    for k in range(size - 1, 0, -1):
        wait[k] = min(wait[2 * k], wait[2 * k + 1])
    doubles = np.zeros(n, np.bool_)
    counts = np.zeros(n // _STRIDE + 1, np.int64)
    by_need = stable_order(-1.0 * min_gpus)  # those who need most can start no more first
    arrays = columns, begins, wait, doubles, counts, by_need, np.empty(n, np.int32)
    return _fold(arrays, share, remaining, speeds, at, min_gpus, cap, gpus)


@borrower
def _fold(
    arrays: _Arrays,
    share: IntArray,
    remaining: FloatArray,
    speeds: FloatArray,
    at: IntArray,
    min_gpus: IntArray,
    cap: IntArray,
    gpus: int,
) -> int:
    columns, begins, wait, doubles, counts, by_need, chain = arrays
    n, size = len(share), len(wait) // 2
    gone, waiting = 0, n
    top, start = -1, 0  # the chain's end, and where to look for the next one to beat it
    while gpus > 0:
        while gone < n and min_gpus[by_need[gone]] > gpus:
            if wait[size + by_need[gone]] < np.inf:
                _start(wait, size, by_need[gone])
                waiting -= 1
                top = -1
            gone += 1
        if waiting == 0:
            break
        w, top = _winner(wait, size, columns, begins, doubles, counts, chain, top, start)
        if top >= 0 and w == chain[top]:
            top -= 1
        start, step = w, 1
        if share[w] == 0:
            step = min_gpus[w]
            _start(wait, size, w)
            waiting -= 1
        share[w] += step
        gpus -= step
        set_job(columns, w, share[w], cap[w], remaining[w], speeds, at[w])
        lift(columns, begins, w, _BAR)
        counts[w // _STRIDE] -= doubles[w]
        doubles[w] = columns[SHORT, w] >= 1.0
        counts[w // _STRIDE] += doubles[w]
    return gpus


@inlined
def _winner(
    wait: FloatArray,
    size: int,
    columns: FloatArray,
    begins: IntArray,
    doubles: BoolArray,
    counts: NDArray[np.int64],
    chain: IntArray,
    top: int,
    start: int,
) -> tuple[int, int]:
    """Who is left of the fold over all candidates, one without a share among them; and the end of the chain.

    As in `tournament` the chain of holders stands until its end, and the search goes on from the last winner.
    """
    n = len(doubles)
    if top < 0:
        begin = np.int64(0)  # a plain 0 would be a type of its own, for which these were compiled again
        first = _next_doubler(doubles, counts, begin)
        if first == n:
            return _shortest(wait, size, begin), top
        holder = _next_waiting(wait, size, begin)
        if first < holder:
            holder = 0
            while columns[SHORT, holder] == -np.inf:
                holder += 1
        chain[0], top, start = holder, 0, holder + 1
    while True:
        holder = chain[top]
        if wait[size + holder] < np.inf:
            found = _next_doubler(doubles, counts, start)
            if found == n:
                return _shortest(wait, size, holder), top
        else:
            found = -1
            if start < n:
                found, _ = next_to_beat(columns, begins, start, holder, _BAR)
            if not doubles[holder] and start < size:
                waits = _next_waiting(wait, size, start)
                if waits < n and (found < 0 or waits < found):
                    found = waits
            if found < 0:
                return holder, top
        top += 1
        chain[top], start = found, found + 1


@borrower
def _next_doubler(doubles: BoolArray, counts: NDArray[np.int64], start: int) -> int:
    """The first from `start` on; the number of jobs if there is none."""
    n, j = len(doubles), start
    while j < n:
        if counts[j // _STRIDE] == 0:
            j = (j // _STRIDE + 1) * _STRIDE
        elif doubles[j]:
            return j
        else:
            j += 1
    return n


@borrower
def _start(wait: FloatArray, size: int, j: int) -> None:
    """The job waits no more."""
    k = size + j
    wait[k] = np.inf
    k >>= 1
    while k > 0:
        wait[k] = min(wait[2 * k], wait[2 * k + 1])
        k >>= 1


@borrower
def _next_waiting(wait: FloatArray, size: int, start: int) -> int:
    """The first from `start` on; `size` if there is none."""
    k = size + start
    while wait[k] == np.inf:
        while k & 1:
            k >>= 1
        if k == 0:
            return size
        k += 1
    while k < size:
        k *= 2
        if wait[k] == np.inf:
            k += 1
    return k - size


@borrower
def _shortest(wait: FloatArray, size: int, start: int) -> int:
    """The shortest from `start` on, the last of equals."""
    k = size + start
    best, node = wait[k], k
    while True:
        while k & 1:
            k >>= 1
        if k == 0:
            break
        k += 1
        if wait[k] <= best:
            best, node = wait[k], k
    while node < size:
        node = 2 * node + 1 if wait[2 * node + 1] == best else 2 * node
    return node - size
