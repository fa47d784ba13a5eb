"""The tournament of AFS without lengths (AFS-P) among jobs that are alike: the same winners, found by class.

Jobs of one speed curve and share gain alike: they are a class, and a trace of a hundred thousand jobs has a dozen
of them at a time. A class is a set of places in the fold, a bit each. So what `tournament_by_gain` finds in blocks
of jobs is found here in words of 64 places: those whose `short` is above every `long` (the contenders) are the sets
of some classes, taken together, and who wins goes from one set to another.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from shoal.policies.base import FloatArray, IntArray
from shoal.policies.gains import gains
from shoal.policies.lanes import highest_bit, lowest_bit
from shoal.policies.tournament_by_gain import FIRST, LAST, coin

#: With more classes to begin with, jobs are not alike; as they get GPUs there may be so many.
_ALIKE, _CLASSES = 16, 64
# Of a class: which cell of the speed curves its jobs are at, and how many they are.
_CELL, _JOBS = 0, 1
# What a GPU more gains, as the shorter and as the longer job.
_SHORT, _LONG = 0, 1
_WORD = 64


@njit(cache=True)
def hand_out_among_alike(
    share: IntArray,
    rows: IntArray,
    speeds: FloatArray,
    at: IntArray,
    cap: IntArray,
    gpus: int,
    tie: int,
    nonce: int,
) -> int:
    """As `hand_out_by_gain`, while there are few classes; returns how many GPUs are still to be handed out."""
    n = len(rows)
    words = (n + _WORD - 1) // _WORD
    class_at, class_of = np.full(len(speeds), -1, np.int8), np.empty(n, np.int8)
    classes, gain = np.zeros((2, _CLASSES), np.int32), np.empty((2, _CLASSES))
    members = np.zeros((_CLASSES, words), np.int64)
    count, need = 0, 0
    for i in range(n):
        r = rows[i]
        if share[r] < cap[r]:
            k = class_at[at[r] + share[r]]
            if k < 0:
                if count == _ALIKE:
                    return gpus
                k = _new_class(class_at, classes, gain, count, speeds, at[r] + share[r])
                count += 1
            class_of[i] = k
            classes[_JOBS, k] += 1
            members[k, i // _WORD] |= 1 << i % _WORD
            need += cap[r] - share[r]
    if need <= gpus:
        for r in rows:
            share[r] = max(share[r], cap[r])
        return 0
    contenders, top, stale = np.zeros(words, np.int64), 0.0, True
    while gpus > 0:
        if stale:
            top = _contend(contenders, members, gain, count)
        w = _winner(contenders, members, class_of, gain, count, top, tie, nonce, gpus)
        k, r, word, bit = class_of[w], rows[w], w // _WORD, 1 << w % _WORD
        members[k, word] ^= bit
        contenders[word] &= ~bit
        classes[_JOBS, k] -= 1
        stale = False
        if classes[_JOBS, k] == 0:
            stale = gain[_LONG, k] == top
            class_at[classes[_CELL, k]] = -1
            gain[_SHORT, k] = gain[_LONG, k] = -np.inf
        more = _takes(speeds, at[r] + share[r], min(gpus, cap[r] - share[r]), gain, count)
        share[r] += more
        gpus -= more
        if share[r] == cap[r]:
            continue
        k = class_at[at[r] + share[r]]
        if k < 0:
            k = _new_class(class_at, classes, gain, count, speeds, at[r] + share[r])
            if k == _CLASSES:
                break
            count = max(count, k + 1)
        class_of[w] = k
        classes[_JOBS, k] += 1
        members[k, word] |= bit
        if gain[_SHORT, k] > top:
            contenders[word] |= bit
            stale = stale or gain[_LONG, k] > top
    return gpus


@njit(cache=True)
def _new_class(
    class_at: IntArray, classes: IntArray, gain: FloatArray, count: int, speeds: FloatArray, cell: int
) -> int:
    """A class for those at this cell: in the stead of one without jobs, or a further one."""
    k = 0
    while k < count and classes[_JOBS, k] > 0:
        k += 1
    if k < _CLASSES:
        class_at[cell], classes[_CELL, k] = k, cell
        gain[_SHORT, k], gain[_LONG, k] = gains(speeds, cell, 0, 1)
    return k


@njit(cache=True, inline="always")
def _takes(speeds: FloatArray, cell: int, most: int, gain: FloatArray, count: int) -> int:
    """What the winner takes: a GPU, and more while it beats all others, whoever is longer. Speed may rise in steps."""
    others = -np.inf
    for k in range(count):
        others = max(others, gain[_SHORT, k])
    taken = 1
    while taken < most and gains(speeds, cell, taken, most)[1] > others:
        taken += 1
    return taken


@njit(cache=True)
def _contend(contenders: IntArray, members: IntArray, gain: FloatArray, count: int) -> float:
    """The largest gain as the longer job; those whose gain as the shorter one is above it are contenders."""
    top = -np.inf
    for k in range(count):
        top = max(top, gain[_LONG, k])
    contenders[:] = 0
    for k in range(count):
        if gain[_SHORT, k] > top:
            for word in range(len(contenders)):
                contenders[word] |= members[k, word]
    return top


@njit(cache=True, inline="always")
def _winner(
    contenders: IntArray,
    members: IntArray,
    class_of: IntArray,
    gain: FloatArray,
    count: int,
    top: float,
    tie: int,
    nonce: int,
    gpu: int,
) -> int:
    """Who is left of the fold."""
    holder = -1 if tie == FIRST else _last_with_luck(contenders, tie, nonce, gpu)
    if holder < 0:
        first = _first(contenders)
        if first >= 0 and gain[_LONG, class_of[first]] == top:
            holder = first
    above = np.inf
    if holder >= 0:
        # The contenders behind it have had their coins, and nobody else gains more than `top`.
        if gain[_LONG, class_of[holder]] == top:
            return holder
        above = top
    else:
        holder = _next(members, class_of, gain, count, -1, above, tie, nonce, gpu)
    found = holder
    while found >= 0:
        holder = found
        found = _next(members, class_of, gain, count, holder, above, tie, nonce, gpu)
        above = np.inf
    return holder


@njit(cache=True, inline="always")
def _last_with_luck(contenders: IntArray, tie: int, nonce: int, gpu: int) -> int:
    """The last of the contenders to whom its coin is kind, or -1."""
    for word in range(len(contenders) - 1, -1, -1):
        bits = contenders[word]
        while bits:
            bit = highest_bit(bits)
            if tie == LAST or coin(nonce, gpu, word * _WORD + bit):
                return word * _WORD + bit
            bits ^= 1 << bit
    return -1


@njit(cache=True, inline="always")
def _first(contenders: IntArray) -> int:
    for word in range(len(contenders)):
        if contenders[word]:
            return word * _WORD + lowest_bit(contenders[word])
    return -1


@njit(cache=True)
def _next(
    members: IntArray,
    class_of: IntArray,
    gain: FloatArray,
    count: int,
    holder: int,
    but: float,
    tie: int,
    nonce: int,
    gpu: int,
) -> int:
    """The first place behind the holder's that beats it (the first of all, without one), or -1.

    Classes that gain more than `but` as the shorter job are known not to.
    """
    short = long_ = -np.inf
    if holder >= 0:
        short, long_ = gain[_SHORT, class_of[holder]], gain[_LONG, class_of[holder]]
    may, found = np.empty(count, np.int8), 0
    for k in range(count):
        if gain[_SHORT, k] <= but and (gain[_SHORT, k] > long_ or gain[_LONG, k] >= short):
            may[found] = k
            found += 1
    if found == 0:
        return -1
    start = (holder + 1) // _WORD
    asked = -1 << (holder + 1) % _WORD
    for word in range(start, members.shape[1]):
        bits = 0
        for k in may[:found]:
            bits |= members[k, word]
        bits &= asked
        asked = -1
        while bits:
            i = word * _WORD + lowest_bit(bits)
            if gain[_LONG, class_of[i]] >= short or tie == LAST or (tie != FIRST and coin(nonce, gpu, i)):
                return i
            bits &= bits - 1
    return -1
