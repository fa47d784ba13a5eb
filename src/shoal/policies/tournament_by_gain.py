"""The tournament of AFS without lengths (AFS-P): who gets the next GPU, one after the other, exactly.

The same left fold as in `tournament`, of a simpler relation. A job's gain by one GPU more counts as `short` if
it is the shorter of two and as `long` if it is the longer one; who wins whichever of them is longer wins, and
where that depends on the unknown lengths a tie rule decides: who comes first or last in the fold, or a coin,
tossed anew in every comparison for every GPU.

Where speeds are smooth a fold changes its holder a hundred times, so it is not walked but looked at from behind.
Coins are a hash of the decision, the GPU and the challenger's place: each can be looked at without those before it.
A job lasts if its `long` reaches the `short` of every later one to whom its coin is kind, and its `short` is above
every later `long`. Who holds and lasts wins. A coin that is kind to a job whose `short` is above every `long` makes
it the holder, whoever was. Of those that last from there on, the first to whom its coin is kind holds, too: had the
one before withstood it, that one would last as well. Left are those that last before it, with unkind coins: each
holds only if it beats the one that it meets without a coin, which is rarely possible and then looked into.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from shoal.core.compiled import borrower, inlined, kernel
from shoal.policies.base import FloatArray, IntArray
from shoal.policies.candidates import (
    LENGTH,
    LONG,
    SHORT,
    largest_before,
    largest_of_others,
    lift_gains,
    next_block,
    plant,
    set_job,
    with_largest,
)
from shoal.policies.lanes import (
    LANES,
    highest_bit,
    largest_of,
    lowest_bit,
    who_beats,
    who_gains_above,
    who_lasts,
)

#: What decides where lengths would: a coin, the order of the fold, or the larger `short`. Who wins whatever the lengths
#: has that, too, so the last is an order, and the largest wins without a fold, the first of equals.
BY_COIN, FIRST, LAST, LARGEST = 1, 2, 3, 4
#: So deep questions are looked at from behind; a deeper one is rare, and its fold is walked.
_DEPTHS = 3


class _Seen(NamedTuple):
    """What comes after the blocks of candidates, by depth: while one place is asked about, so may be others before."""

    #: The largest gains after each block: as the shorter job, of those to whom their coins are kind, and as the longer.
    short: FloatArray
    long: FloatArray
    #: Blocks, the last first, in which somebody may last.
    blocks: IntArray
    #: Of the GPU at hand, a bit for each candidate.
    coins: IntArray


@inlined
def coins(tie: int, nonce: int, gpu: int, word: int) -> int:
    """64 coins, a bit each, of challengers at places from 64 * word on: set if heads, for the challenger.

    The same for the same arguments, a 64-bit mix of all of them.
    """
    if tie != BY_COIN:
        return -1 if tie == LAST else 0
    place = (np.uint64(gpu) << np.uint64(32)) | np.uint64(word)
    x = np.uint64(nonce) + place * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return int(np.int64(x ^ (x >> np.uint64(31))))


@inlined
def _coins_of_block(tie: int, nonce: int, gpu: int, b: int) -> int:
    """Those of the eight candidates of a block."""
    return coins(tie, nonce, gpu, b // LANES) >> b % LANES * LANES


@kernel
def hand_out_by_gain(
    share: IntArray,
    rows: IntArray,
    speeds: FloatArray,
    at: IntArray,
    cap: IntArray,
    gpus: int,
    tie: int,
    nonce: int,
) -> None:
    """Hand out `gpus` one by one among `rows`, which all have a share: each to the winner of the fold over them."""
    n, need = len(rows), 0
    held, limit, begin = np.empty(n, np.int32), np.empty(n, np.int32), np.empty(n, np.int32)
    for i in range(n):
        r = rows[i]
        held[i], limit[i], begin[i] = share[r], cap[r], at[r]
        need += max(limit[i] - held[i], 0)
    if need <= gpus:
        for i in range(n):
            share[rows[i]] = max(held[i], limit[i])
        return
    columns, begins = plant(held, limit, np.zeros(n), speeds, begin)
    blocks = begins[1] // LANES
    seen = _Seen(
        np.empty((_DEPTHS, blocks)),
        np.empty((_DEPTHS, blocks)),
        np.empty((_DEPTHS, blocks), np.int32),
        np.empty((blocks + LANES - 1) // LANES, np.int64),
    )
    _hand_out(columns, begins, seen, held, limit, begin, speeds, gpus, tie, nonce)
    for i in range(n):
        share[rows[i]] = held[i]


@borrower
def _hand_out(
    columns: FloatArray,
    begins: IntArray,
    seen: _Seen,
    held: IntArray,
    limit: IntArray,
    begin: IntArray,
    speeds: FloatArray,
    gpus: int,
    tie: int,
    nonce: int,
) -> None:
    best, first = -1, 0
    while gpus > 0:
        while held[first] >= limit[first]:
            first += 1
        if tie == LARGEST:
            best = with_largest(columns, begins, SHORT)
        elif best < 0:
            best = with_largest(columns, begins, LONG)
        if tie == LARGEST:
            w = best
        elif tie == FIRST:
            w = _winner_by_order(columns, begins, first, best, len(held), tie, nonce, gpus)
        else:
            w = _winner_by_coins(columns, begins, seen, first, best, len(held), tie, nonce, gpus)
        held[w] += 1
        gpus -= 1
        set_job(columns, w, held[w], limit[w], 0.0, speeds, begin[w])
        if w == best or columns[LONG, w] > columns[LONG, best]:
            others, best = largest_of_others(columns, begins, w), -1
            while gpus > 0 and columns[LONG, w] > others:  # it beats them all, whoever is longer
                held[w] += 1
                gpus -= 1
                set_job(columns, w, held[w], limit[w], 0.0, speeds, begin[w])
        lift_gains(columns, begins, w)


@inlined
def _winner_by_order(
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
def _winner_by_coins(
    columns: FloatArray,
    begins: IntArray,
    seen: _Seen,
    first: int,
    best: int,
    n: int,
    tie: int,
    nonce: int,
    gpu: int,
) -> int:
    """Likewise, if coins may be: found from behind."""
    depth, bound = np.int64(0), columns[LONG, best]
    begin, blocks = _look_back(columns, begins, seen, depth, first, n, bound, tie, nonce, gpu)
    return _holder(columns, begins, seen, depth, blocks, begin, n, tie, nonce, gpu)


@borrower
def _holder(
    columns: FloatArray,
    begins: IntArray,
    seen: _Seen,
    depth: int,
    blocks: int,
    begin: int,
    end: int,
    tie: int,
    nonce: int,
    gpu: int,
) -> int:
    """Who holds before `end`, if `begin` holds at its own place; as `_look_back` has seen it."""
    while True:  # somebody does
        blocks -= 1
        b = seen.blocks[depth, blocks]
        asked = ~(-1 << min(end - b * LANES, LANES))
        heads = seen.coins[b // LANES] >> b % LANES * LANES
        last = who_lasts(columns, b * LANES, asked, heads, seen.short[depth, b], seen.long[depth, b])
        last &= -1 << max(begin - b * LANES, 0)
        while last:
            lane = lowest_bit(last)
            at = b * LANES + lane
            if at == begin or heads >> lane & 1:
                return at
            if _may_outdo(columns, begin, at, tie, nonce, gpu):
                if depth + 1 < _DEPTHS:
                    _, more = _look_back(columns, begins, seen, depth + 1, begin, at, np.inf, tie, nonce, gpu)
                    holder = _holder(columns, begins, seen, depth + 1, more, begin, at, tie, nonce, gpu)
                else:
                    holder = _fold(columns, begins, begin, at, tie, nonce, gpu)
                if columns[LONG, at] >= columns[SHORT, holder]:
                    return at
            last &= last - 1


@borrower
def _look_back(
    columns: FloatArray,
    begins: IntArray,
    seen: _Seen,
    depth: int,
    begin: int,
    end: int,
    bound: float,
    tie: int,
    nonce: int,
    gpu: int,
) -> tuple[int, int]:
    """See what comes before `end`, back to the last one that holds for sure: its place, and the number of blocks.

    That is one that gains more than `bound` as the shorter job and to whom its coin is kind, or else `begin`.
    """
    b, blocks, short, long_ = (end - 1) // LANES, 0, -np.inf, -np.inf
    flips, asked = coins(tie, nonce, gpu, b // LANES), ~(-1 << end - b * LANES)
    level, last, to_see = begins[1], begin // LANES, -1
    while True:
        # Unsigned, or each would be asked whether it counts from the end.
        block, above, count, here = np.uint64(b), np.uint64(level + b), np.uint64(blocks), np.uint64(depth)
        seen.short[here, block], seen.long[here, block], seen.blocks[here, count] = short, long_, b
        # Added, not branched on: that would be guessed wrong as often as not.
        blocks += (columns[LONG, above] >= short) & (columns[SHORT, above] > long_)
        heads = flips >> b % LANES * LANES & asked
        short = max(short, largest_of(columns, SHORT, b * LANES, heads))
        if short > bound:
            begin, last = b * LANES + highest_bit(heads & who_gains_above(columns, b * LANES, bound)), b
        if b == last:
            seen.coins[b // LANES] = flips
            return begin, blocks
        most = columns[LONG, above] if asked == -1 else largest_of(columns, LONG, b * LANES, asked)
        asked, long_ = -1, max(long_, most)
        to_see &= ~(-1 << b % LANES)
        if to_see:
            b = b // LANES * LANES + highest_bit(to_see)
        else:
            seen.coins[b // LANES] = flips
            b, to_see = _pass_over(columns, begins, b // LANES * LANES - 1, last, short)
            flips = coins(tie, nonce, gpu, b // LANES)


@inlined
def _pass_over(columns: FloatArray, begins: IntArray, b: int, last: int, short: float) -> tuple[int, int]:
    """The next block to see, of those up to b, which ends its eight; and which of the eight are to be seen, as bits.

    Blocks, and groups of blocks, in which nobody gains as much as `short` are not: nobody lasts there, nor do they
    count for those before, because who lasts gains `short` and more.
    """
    level, i, width = 1, b, 1
    while True:
        if i % LANES == LANES - 1 and level < len(begins) - 2:
            level, i, width = level + 1, i // LANES, width * LANES
            continue
        while level > 1:
            most = columns[SHORT, begins[level] + i]
            little = most == -np.inf or (most <= short and columns[LONG, begins[level] + i] < short)
            if little and i * width > last:
                break
            level, i, width = level - 1, i * LANES + LANES - 1, width // LANES
        if level == 1:
            eight = i // LANES
            short_, long_ = who_beats(columns, begins[1] + eight * LANES, short, short)
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
