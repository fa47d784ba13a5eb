"""Who is left of one fold of AFS without lengths (AFS-P): looked at from behind.

Where speeds are smooth a fold changes its holder a hundred times, so it is not walked. Coins are a hash of the
decision, the GPU and the challenger's place among those that play: each can be looked at without those before it. A job
lasts if its `long` reaches the `short` of every later one to whom its coin is kind, and its `short` is above every
later `long`. Who holds and lasts wins. A coin that is kind to a job whose `short` is above every `long` makes it the
holder, whoever was. Of those that last from there on, the first to whom its coin is kind holds, too: had the one before
withstood it, that one would last as well. Left are those that last before it, with unkind coins: each holds only if it
beats the one that it meets without a coin, which is rarely possible and then looked into.

Candidates are seen in groups of 64, a word of coins each: what a group means to those before it is two numbers, and if
somebody in it may last at all it is noted in which of its blocks.
"""

from __future__ import annotations

import numpy as np

from shoal.core.arrays import FloatArray, IntArray
from shoal.core.compiled import borrower, inlined
from shoal.policies.afs.candidates import (
    LENGTH,
    LONG,
    SHORT,
    largest_before,
    next_block,
)
from shoal.policies.afs.coins import coins
from shoal.policies.afs.lanes import (
    GROUP,
    LANES,
    highest_bit,
    largest_of,
    largest_of_group,
    lowest_bit,
    see_group,
    who_beats,
    who_gains_above,
    who_lasts,
)

#: So deep questions are looked at from behind; a deeper one is rare, and its fold is walked.
_DEPTHS = 3
#: Rows of what was seen, for each depth, as while one place is asked about so may be others before it. The groups in
#: which somebody may last, the last first, each with the bits of such blocks. And of their blocks what comes after:
#: the largest gains, as the shorter job, of those to whom their coins are kind, and as the longer.
_CHALLENGE, _OUTDO, _GROUPS, _ROWS = 0, 1, 2, 3


@inlined
def _coins_of_block(tie: int, nonce: int, gpu: int, b: int) -> int:
    """Those of the eight candidates of a block."""
    return coins(tie, nonce, gpu, b // LANES) >> b % LANES * LANES


@inlined
def nothing_seen(begins: IntArray) -> FloatArray:
    """What `winner_by_coins` writes to as it looks back."""
    return np.empty((_DEPTHS * _ROWS, begins[1] // LANES))


@inlined
def winner_by_order(
    columns: FloatArray, begins: IntArray, first: int, best: int, n: int, tie: int, nonce: int, gpu: int
) -> int:
    """Who is left of the fold if no coin is kind; `best` gains most as the longer job, `first` takes part.

    `best` holds, whoever was before it, where it beats all of them.
    """
    gain = columns[LONG, best]
    if gain > -np.inf and gain >= largest_before(columns, begins, best):
        first = best
    return _fold(columns, begins, first, n, tie, nonce, gpu)


@inlined
def winner_by_coins(
    columns: FloatArray,
    begins: IntArray,
    seen: FloatArray,
    first: int,
    best: int,
    tie: int,
    nonce: int,
    gpu: int,
) -> int:
    """Likewise, if coins may be: found from behind."""
    depth, end, bound = np.int64(0), np.int64(begins[1]), columns[LONG, best]
    begin, groups = _look_back(columns, begins, seen, depth, first, end, bound, tie, nonce, gpu)
    return _holder(columns, begins, seen, depth, groups, begin, end, tie, nonce, gpu)


@borrower
def _holder(
    columns: FloatArray,
    begins: IntArray,
    seen: FloatArray,
    depth: int,
    groups: int,
    begin: int,
    end: int,
    tie: int,
    nonce: int,
    gpu: int,
) -> int:
    """Who holds before `end`, if `begin` holds at its own place; as `_look_back` has seen it."""
    row = depth * _ROWS
    while True:  # somebody does
        groups -= 1
        noted = int(seen[row + _GROUPS, groups])
        g, blocks = noted >> LANES, noted & ~(-1 << LANES)
        blocks &= -1 << max(begin // LANES - g * LANES, 0)
        heads, asked = coins(tie, nonce, gpu, g), _first_bits(end - g * GROUP)
        while blocks:
            b = g * LANES + lowest_bit(blocks)
            blocks &= blocks - 1
            challenge, outdo, shift = seen[row + _CHALLENGE, b], seen[row + _OUTDO, b], b % LANES * LANES
            if asked != -1:
                outdo = _largest_between(columns, begins, b + 1, end)
            last = who_lasts(columns, b * LANES, asked >> shift, heads >> shift, challenge, outdo)
            last &= -1 << max(begin - b * LANES, 0)
            while last:
                at = b * LANES + lowest_bit(last)
                last &= last - 1
                if at == begin or heads >> at % GROUP & 1:
                    return at
                if _may_outdo(columns, begin, at, tie, nonce, gpu):
                    if depth + 1 < _DEPTHS:
                        _, more = _look_back(
                            columns, begins, seen, depth + 1, begin, at, np.inf, tie, nonce, gpu
                        )
                        holder = _holder(columns, begins, seen, depth + 1, more, begin, at, tie, nonce, gpu)
                    else:
                        holder = _fold(columns, begins, begin, at, tie, nonce, gpu)
                    if columns[LONG, at] >= columns[SHORT, holder]:
                        return at


@inlined
def _first_bits(count: int) -> int:
    """So many of 64."""
    return -1 if count >= GROUP else ~(-1 << count)


@borrower
def _look_back(
    columns: FloatArray,
    begins: IntArray,
    seen: FloatArray,
    depth: int,
    begin: int,
    end: int,
    bound: float,
    tie: int,
    nonce: int,
    gpu: int,
) -> tuple[int, int]:
    """See what comes before `end`, back to the last one that holds for sure: its place, and the number of groups.

    That is one that gains more than `bound` as the shorter job and to whom its coin is kind, or else `begin`.
    """
    g, groups, short, long_ = (end - 1) // GROUP, 0, -np.inf, -np.inf
    asked, row, blocks = _first_bits(end - g * GROUP), depth * _ROWS, begins[1]
    level, last, to_see = begins[2], begin // GROUP, -1
    while True:
        heads = coins(tie, nonce, gpu, g) & asked
        at, above = g * GROUP, blocks + g * LANES
        # Unsigned, or it would be asked whether it counts from the end.
        most, count = columns[LONG, np.uint64(level + g)], np.uint64(groups)
        if asked != -1:
            most = _largest_between(columns, begins, g * LANES, end)
        if asked != -1 or (most >= short and columns[SHORT, np.uint64(level + g)] > long_):
            kind, bits = see_group(columns, at, above, heads, asked == -1, short, long_, seen, row)
        else:
            kind, bits = largest_of_group(columns, at, heads), 0
        seen[np.uint64(row + _GROUPS), count] = g << LANES | bits
        # Added, not branched on: that would be guessed wrong as often as not.
        groups += bits != 0
        short, long_, asked = max(short, kind), max(long_, most), -1
        if short > bound:
            begin, last = _last_above(columns, at, heads, bound), g
        if g == last:
            return begin, groups
        to_see &= ~(-1 << g % LANES)
        if to_see:
            g = g // LANES * LANES + highest_bit(to_see)
        else:
            g, to_see = _pass_over(columns, begins, g // LANES * LANES - 1, last, short)


@inlined
def _largest_between(columns: FloatArray, begins: IntArray, b: int, end: int) -> float:
    """The largest gain as the longer job from a block on to `end`, where its group is not whole."""
    largest = -np.inf
    while (b + 1) * LANES <= end:
        largest = max(largest, columns[LONG, begins[1] + b])
        b += 1
    return max(largest, largest_of(columns, LONG, b * LANES, ~(-1 << max(end - b * LANES, 0))))


@inlined
def _last_above(columns: FloatArray, at: int, heads: int, bound: float) -> int:
    """The last one of a group that gains more than `bound` as the shorter job and to whom its coin is kind."""
    at, lucky = at + GROUP, np.int64(0)
    while not lucky:
        at -= LANES
        lucky = heads >> at % GROUP & who_gains_above(columns, at, bound)
    return at + highest_bit(lucky)


@inlined
def _pass_over(columns: FloatArray, begins: IntArray, g: int, last: int, short: float) -> tuple[int, int]:
    """The next group to see, of those up to g, which ends its eight; and which of the eight are to be seen, as bits.

    Groups, and groups of groups, in which nobody gains as much as `short` are not: nobody lasts there, nor do they
    count for those before, because who lasts gains `short` and more.
    """
    level, i, width = 2, g, 1
    while True:
        if i % LANES == LANES - 1 and level < len(begins) - 2:
            level, i, width = level + 1, i // LANES, width * LANES
            continue
        while level > 2:
            most = columns[SHORT, begins[level] + i]
            little = most == -np.inf or (most <= short and columns[LONG, begins[level] + i] < short)
            if little and i * width > last:
                break
            level, i, width = level - 1, i * LANES + LANES - 1, width // LANES
        if level == 2:
            eight = i // LANES
            short_, long_ = who_beats(columns, begins[2] + eight * LANES, short, short)
            to_see = short_ | long_
            if eight == last // LANES:
                to_see |= 1 << last % LANES
            if to_see:
                return eight * LANES + highest_bit(to_see), to_see
            i = eight * LANES
        i -= 1


@inlined
def _may_outdo(columns: FloatArray, begin: int, at: int, tie: int, nonce: int, gpu: int) -> bool:
    """Whether the holder that this one meets may be one that it beats whatever its coin.

    Such a one gains less than this one, and so is beaten by any that gains more and to whom its coin is kind.
    """
    gain, b, short, long_ = columns[LONG, at], (at - 1) // LANES, -np.inf, -np.inf
    asked = ~(-1 << at - b * LANES)
    while b >= begin // LANES and short <= gain:
        heads = _coins_of_block(tie, nonce, gpu, b) & asked
        last = who_lasts(columns, b * LANES, asked, heads, short, long_)
        if last & ~who_gains_above(columns, b * LANES, gain):
            return True
        short = max(short, largest_of(columns, SHORT, b * LANES, heads))
        long_ = max(long_, largest_of(columns, LONG, b * LANES, asked))
        b, asked = b - 1, -1
    return False


@borrower
def _fold(
    columns: FloatArray, begins: IntArray, holder: int, end: int, tie: int, nonce: int, gpu: int
) -> int:
    """Who holds before `end`, if this one holds at its own place: from each holder to the next that beats it."""
    found = holder
    while 0 <= found < end:
        holder = found
        found = _next_to_beat(columns, begins, holder, tie, nonce, gpu)
    return holder


@inlined
def _next_to_beat(columns: FloatArray, begins: IntArray, holder: int, tie: int, nonce: int, gpu: int) -> int:
    """The first candidate after the holder that beats it, or -1."""
    short, long_ = columns[SHORT, holder], columns[LONG, holder]
    b = holder // LANES
    asked = -1 << holder - b * LANES + 1
    while b >= 0:
        by_coin, surely = who_beats(columns, b * LANES, short, long_)
        bits = (by_coin & _coins_of_block(tie, nonce, gpu, b) | surely) & asked
        if bits:
            return b * LANES + lowest_bit(bits)
        b, asked = next_block(columns, begins, b + 1, LENGTH, 0.0, short, long_), -1
    return -1
