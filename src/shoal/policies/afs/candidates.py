"""The candidates of AFS's folds: their lengths and gains, in blocks of eight, blocks of blocks, and so on.

A column per candidate, then one per block of eight candidates, then one per block of eight blocks: level by
level, until few are left. A block carries the best values of all below it, so that it is passed over where
nobody can beat the holder. All levels are looked at eight columns at a time (`lanes`).

Nobody beats most holders because the many with gains like theirs are longer and the shorter ones gain less.
So blocks also carry the shortest length among those whose gain reaches a bar.
"""

from __future__ import annotations

import numpy as np

from shoal.core.arrays import FloatArray, IntArray
from shoal.core.compiled import borrower, inlined, kernel
from shoal.policies.afs.gains import gains
from shoal.policies.afs.lanes import (
    GROUP,
    LANES,
    best_of_blocks,
    best_of_jobs,
    first_that_may,
    first_to_beat,
    largest_of,
)

# Rows: the length, and the gains as the shorter and as the longer job: of a candidate, or the shortest length
# and the largest gains below; then, but for candidates, the shortest length of those whose gain as the shorter
# job reaches the bar.
LENGTH, SHORT, LONG, ABOVE = 0, 1, 2, 3
# The gains as the shorter job once more, a group of 64 candidates turned: the first of each of its blocks, then the
# second of each, and so on.
TURNED = 4
#: So many blocks are looked at one after the other, without further ones above them.
_TOP = 64


@kernel
def plant(
    held: IntArray,
    limit: IntArray,
    left: FloatArray,
    speeds: FloatArray,
    begin: IntArray,
    in_groups: bool,
) -> tuple[FloatArray, IntArray]:
    """The columns of all levels end to end, without a bar; and where each level begins, and the last one ends.

    In groups, the candidates are made up to whole ones, there is a level of them, and the turned row is filled.
    """
    begins, least = np.empty(16, np.int32), 3 if in_groups else 2
    begins[0] = 0
    count, level = _padded(len(held), GROUP if in_groups else LANES), 0
    while level < least or begins[level] - begins[level - 1] > _TOP:
        begins[level + 1] = begins[level] + count
        count, level = _padded(count // LANES, LANES), level + 1
    columns, begins = np.empty((5, begins[level])), begins[: level + 1].copy()
    _fill(columns, held, limit, left, speeds, begin)
    if in_groups:
        _turn_all(columns, begins[1])
    set_bar(columns, begins, np.inf)
    return columns, begins


@borrower
def _fill(
    columns: FloatArray,
    held: IntArray,
    limit: IntArray,
    left: FloatArray,
    speeds: FloatArray,
    begin: IntArray,
) -> None:
    for i in range(columns.shape[1]):
        columns[LENGTH, i], columns[SHORT, i], columns[LONG, i] = np.inf, -np.inf, -np.inf
        columns[ABOVE, i] = np.inf
    for i in range(len(held)):
        set_job(columns, i, held[i], limit[i], left[i], speeds, begin[i])


@inlined
def _padded(count: int, width: int) -> int:
    return (count + width - 1) // width * width


@inlined
def set_job(
    columns: FloatArray, i: int, gpus: int, limit: int, left: float, speeds: FloatArray, at: int
) -> None:
    """A candidate's length and gains at its share; at its cap it takes no further part."""
    columns[LENGTH, i] = left / speeds[at + gpus] if gpus < limit else np.inf
    columns[SHORT, i], columns[LONG, i] = gains(speeds, at, gpus, limit)


@kernel
def set_bar(columns: FloatArray, begins: IntArray, bar: float) -> None:
    """Bring all blocks up to date, with this bar."""
    for b in range(begins[1] // LANES):
        _pull(columns, begins[1] + b, best_of_jobs(columns, b * LANES, bar))
    for level in range(2, len(begins) - 1):
        for b in range((begins[level] - begins[level - 1]) // LANES):
            _pull(columns, begins[level] + b, best_of_blocks(columns, begins[level - 1] + b * LANES))


@inlined
def lift(columns: FloatArray, begins: IntArray, i: int, bar: float) -> None:
    """Bring the blocks above a candidate up to date."""
    b = i // LANES
    _pull(columns, begins[1] + b, best_of_jobs(columns, b * LANES, bar))
    for level in range(2, len(begins) - 1):
        b //= LANES
        _pull(columns, begins[level] + b, best_of_blocks(columns, begins[level - 1] + b * LANES))


@inlined
def _pull(columns: FloatArray, i: int, best: tuple[float, float, float, float]) -> None:
    columns[LENGTH, i], columns[SHORT, i], columns[LONG, i], columns[ABOVE, i] = best


@inlined
def next_to_beat(
    columns: FloatArray, begins: IntArray, start: int, holder: int, bar: float
) -> tuple[int, int]:
    """The first candidate from `start` on that beats the holder, or -1; and how many were looked at in vain."""
    length, short, long_ = columns[LENGTH, holder], columns[SHORT, holder], columns[LONG, holder]
    # Who beats it as the shorter job gains at least `long_`: a bar no higher than that leaves none of them out.
    row = ABOVE if bar <= long_ else LENGTH
    b, in_vain = start // LANES, 0
    at = first_to_beat(columns, b * LANES, start - b * LANES, length, short, long_)
    while at == LANES:
        b = next_block(columns, begins, b + 1, row, length, short, long_)
        if b < 0:
            return -1, in_vain
        at = first_to_beat(columns, b * LANES, 0, length, short, long_)
        in_vain += LANES
    return b * LANES + at, in_vain


@inlined
def next_block(
    columns: FloatArray, begins: IntArray, b: int, row: int, length: float, short: float, long_: float
) -> int:
    """The first block from b on that may have one to beat the holder, or -1: up the levels, and down again."""
    level, top = 1, len(begins) - 2
    while begins[level] + b < begins[level + 1]:
        eight = b // LANES
        at = first_that_may(
            columns, begins[level] + eight * LANES, b - eight * LANES, row, length, short, long_
        )
        if at < LANES:
            b = eight * LANES + at
            if level == 1:
                return b
            level, b = level - 1, b * LANES
        elif level < top:
            level, b = level + 1, eight + 1
        else:
            b = (eight + 1) * LANES
    return -1


# -- gains alone: for AFS-P ------------------------------------------------------------------------


@borrower
def _turn_all(columns: FloatArray, count: int) -> None:
    for i in range(count):
        turn(columns, i)


@inlined
def turn(columns: FloatArray, i: int) -> None:
    """Bring a candidate's gain as the shorter job up to date where it is turned."""
    columns[TURNED, i // GROUP * GROUP + i % LANES * LANES + i // LANES % LANES] = columns[SHORT, i]


@inlined
def lift_gains(columns: FloatArray, begins: IntArray, i: int) -> None:
    """Bring the gains of the blocks above a candidate up to date."""
    for level in range(len(begins) - 2):
        i //= LANES
        below, above = begins[level] + i * LANES, begins[level + 1] + i
        columns[SHORT, above] = largest_of(columns, SHORT, below, -1)
        columns[LONG, above] = largest_of(columns, LONG, below, -1)


@inlined
def largest_before(columns: FloatArray, begins: IntArray, end: int) -> float:
    """The largest gain as the shorter job of all candidates before `end`."""
    largest, at = -np.inf, end
    for level in range(len(begins) - 1):
        first = at // LANES * LANES if level < len(begins) - 2 else 0
        for i in range(begins[level] + first, begins[level] + at):
            largest = max(largest, columns[SHORT, i])
        at //= LANES
    return largest


@inlined
def largest_of_others(columns: FloatArray, begins: IntArray, i: int) -> float:
    """The largest gain as the shorter job of all candidates but this one."""
    largest = -np.inf
    for level in range(len(begins) - 2):
        b = i // LANES
        rest = ~(1 << i - b * LANES)
        largest, i = max(largest, largest_of(columns, SHORT, begins[level] + b * LANES, rest)), b
    for other in range(begins[-2], begins[-1]):
        if other != begins[-2] + i:
            largest = max(largest, columns[SHORT, other])
    return largest


@inlined
def with_largest(columns: FloatArray, begins: IntArray, row: int) -> int:
    """The first candidate with the largest gain of this row: from the uppermost blocks down."""
    level = len(begins) - 2
    at, end = 0, begins[level + 1] - begins[level]
    while True:
        best = at
        for i in range(at + 1, end):
            if columns[row, begins[level] + i] > columns[row, begins[level] + best]:
                best = i
        if level == 0:
            return best
        level, at, end = level - 1, best * LANES, (best + 1) * LANES
