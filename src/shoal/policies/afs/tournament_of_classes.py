"""The tournament of AFS without lengths (AFS-P) among jobs that are alike: the same winners, found by class.

Jobs of one speed curve and share gain alike: they are a class, and a trace of a hundred thousand jobs has a dozen
of them at a time. A class is a set of places in the fold, a bit each. So what `look_back` finds in groups
of jobs is found here in words of 64 places: those whose `short` is above every `long` (the contenders) are the sets
of some classes, taken together, and who wins goes from one set to another.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from shoal.core.arrays import FloatArray, IntArray
from shoal.core.compiled import borrower, inlined, kernel
from shoal.policies.afs.coins import coins
from shoal.policies.afs.gains import gains
from shoal.policies.afs.lanes import highest_bit, lowest_bit

#: With more classes to begin with, jobs are not alike; as they get GPUs there may be so many (at most 64: a bit each).
_ALIKE, _CLASSES = 16, 32
_WORD = 64


class _Classes(NamedTuple):
    #: The class of those at a cell of the speed curves, or -1, and of each place of the fold.
    at_cell: IntArray
    at_place: IntArray
    #: Of each class: its cell, how many they are, and what a GPU more gains as the shorter and as the longer job.
    cell: IntArray
    jobs: IntArray
    short: FloatArray
    long: FloatArray
    #: Places, a bit each: of each class, and of the contenders.
    members: IntArray
    contenders: IntArray


@kernel
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
    classes = _Classes(
        np.full(len(speeds), -1, np.int8),
        np.empty(n, np.int8),
        np.empty(_CLASSES, np.int32),
        np.zeros(_CLASSES, np.int32),
        np.empty(_CLASSES),
        np.empty(_CLASSES),
        np.zeros((_CLASSES, words), np.int64),
        np.zeros(words, np.int64),
    )
    return _hand_out(classes, share, rows, speeds, at, cap, gpus, tie, nonce)


@borrower
def _hand_out(
    classes: _Classes,
    share: IntArray,
    rows: IntArray,
    speeds: FloatArray,
    at: IntArray,
    cap: IntArray,
    gpus: int,
    tie: int,
    nonce: int,
) -> int:
    # A plain 0 would be a type of its own to the functions below, which would be compiled twice.
    count, need = np.int64(0), 0
    for i in range(len(rows)):
        r = rows[i]
        if share[r] < cap[r]:
            k = classes.at_cell[at[r] + share[r]]
            if k < 0:
                if count == _ALIKE:
                    return gpus
                k = _new_class(classes, count, speeds, at[r] + share[r])
                count += 1
            _enter(classes, k, i)
            need += cap[r] - share[r]
    if need <= gpus:
        for r in rows:
            if share[r] < cap[r]:
                share[r] = cap[r]
        return 0
    top, stale = 0.0, True
    while gpus > 0:
        if stale:
            top = _contend(classes, count)
        w = _winner(classes, count, top, tie, nonce, gpus)
        r, stale = rows[w], _leave(classes, w, top)
        more = _takes(classes, count, speeds, at[r] + share[r], min(gpus, cap[r] - share[r]))
        share[r] += more
        gpus -= more
        if share[r] == cap[r]:
            continue
        k = classes.at_cell[at[r] + share[r]]
        if k < 0:
            k = _new_class(classes, count, speeds, at[r] + share[r])
            if k == _CLASSES:
                break
            if k == count:
                count += 1
        _enter(classes, k, w)
        if classes.short[k] > top:
            classes.contenders[w // _WORD] |= 1 << w % _WORD
            stale = stale or classes.long[k] > top
    return gpus


@borrower
def _new_class(classes: _Classes, count: int, speeds: FloatArray, cell: int) -> int:
    """A class for those at this cell: in the stead of one without jobs, or a further one.

    `_CLASSES`, which is none, if there is no room.
    """
    k = 0
    while k < count and classes.jobs[k] > 0:
        k += 1
    if k < _CLASSES:
        classes.at_cell[cell], classes.cell[k] = k, cell
        classes.short[k], classes.long[k] = gains(speeds, cell, 0, 1)
    return k


@inlined
def _enter(classes: _Classes, k: int, place: int) -> None:
    classes.at_place[place] = k
    classes.jobs[k] += 1
    classes.members[k, place // _WORD] |= 1 << place % _WORD


@inlined
def _leave(classes: _Classes, place: int, top: float) -> bool:
    """The place leaves its class, which ends with its last one. Whether `top` may have been the gain of no other."""
    k, word, bit = classes.at_place[place], place // _WORD, 1 << place % _WORD
    classes.members[k, word] ^= bit
    classes.contenders[word] &= ~bit
    classes.jobs[k] -= 1
    if classes.jobs[k] > 0:
        return False
    was = classes.long[k]
    classes.at_cell[classes.cell[k]] = -1
    classes.short[k] = classes.long[k] = -np.inf
    return was == top


@inlined
def _takes(classes: _Classes, count: int, speeds: FloatArray, cell: int, most: int) -> int:
    """What the winner takes: a GPU, and more while it beats all others, whoever is longer. Speed may rise in steps."""
    others, taken = _largest(classes.short, count), 1
    while taken < most and gains(speeds, cell, taken, most)[1] > others:
        taken += 1
    return taken


@inlined
def _largest(gain: FloatArray, count: int) -> float:
    largest = -np.inf
    for k in range(count):
        largest = gain[k] if gain[k] > largest else largest
    return largest


@borrower
def _contend(classes: _Classes, count: int) -> float:
    """The largest gain as the longer job; those whose gain as the shorter one is above it are contenders."""
    top, above = _largest(classes.long, count), 0
    for k in range(count):
        if classes.short[k] > top:
            above |= 1 << k
    for word in range(len(classes.contenders)):
        classes.contenders[word] = _together(classes.members, word, above)
    return top


@inlined
def _together(members: IntArray, word: int, classes: int) -> int:
    """A word of the members of some classes, which are a bit each."""
    bits = 0
    while classes:
        bits |= members[lowest_bit(classes), word]
        classes &= classes - 1
    return bits


@inlined
def _winner(classes: _Classes, count: int, top: float, tie: int, nonce: int, gpu: int) -> int:
    """Who is left of the fold."""
    holder = _last_with_luck(classes.contenders, tie, nonce, gpu)
    if holder < 0:
        first = _first(classes.contenders)
        if first >= 0 and classes.long[classes.at_place[first]] == top:
            holder = first
    if holder >= 0:
        if classes.long[classes.at_place[holder]] == top:
            return holder  # nobody but contenders gains more than that
    else:
        holder = _next(classes, count, holder, top, tie, nonce, gpu)
    found = holder
    while found >= 0:
        holder = found
        found = _next(classes, count, holder, top, tie, nonce, gpu)
    return holder


@inlined
def _last_with_luck(contenders: IntArray, tie: int, nonce: int, gpu: int) -> int:
    """The last of the contenders to whom its coin is kind, or -1."""
    for word in range(len(contenders) - 1, -1, -1):
        bits = contenders[word]
        if bits:
            bits &= coins(tie, nonce, gpu, word)
        if bits:
            return word * _WORD + highest_bit(bits)
    return -1


@inlined
def _first(contenders: IntArray) -> int:
    for word in range(len(contenders)):
        if contenders[word]:
            return word * _WORD + lowest_bit(contenders[word])
    return -1


@borrower
def _next(classes: _Classes, count: int, holder: int, top: float, tie: int, nonce: int, gpu: int) -> int:
    """The first place behind the holder's that beats it (the first of all, without one), or -1.

    No contender does by its coin: had one been kind to any from here on, the fold would have begun there.
    """
    short = long = -np.inf
    if holder >= 0:
        short, long = classes.short[classes.at_place[holder]], classes.long[classes.at_place[holder]]
    by_coin = surely = 0
    for k in range(count):
        if classes.long[k] >= short:
            surely |= 1 << k
        elif long < classes.short[k] <= top:
            by_coin |= 1 << k
    if not by_coin | surely:
        return -1
    asked = -1 << (holder + 1) % _WORD
    for word in range((holder + 1) // _WORD, len(classes.contenders)):
        bits = _together(classes.members, word, by_coin)
        if bits:
            bits &= coins(tie, nonce, gpu, word)
        bits = (bits | _together(classes.members, word, surely)) & asked
        if bits:
            return word * _WORD + lowest_bit(bits)
        asked = -1
    return -1
