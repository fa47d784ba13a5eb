"""The tournament of AFS-L: who gets the next GPU, one GPU after the other, in few comparisons.

Each GPU goes to the winner of a left fold over the candidates in order of submission: the first job holds,
and each further one takes over if it beats the holder. The relation is not transitive, so the order of the
fold is part of the rule, and no sorting can replace it. What makes it quick and still exact:

- The holders form a chain, each the first job after its predecessor that beats it. A grant changes only
  the winner, which is the chain's end, so the chain before it stands.
- The next job that beats a holder is found by what blocks of jobs, and groups of blocks, carry (`candidates`).
  The bar of theirs follows the holders' gains down as they sink; it is set anew when the searches since have
  looked at too many in vain.
- A search leaves behind the largest gains that were set against the holder. As long as a winner stays
  above them, and beats its predecessor, it wins again without a search.
- Where all fit at their caps there is nothing to decide, nor is there before a gap between gains (`in_step`).
"""

from __future__ import annotations

import numpy as np
from numba import njit

from shoal.policies.base import FloatArray, IntArray
from shoal.policies.candidates import LENGTH, LONG, SHORT, lift, next_to_beat, plant, set_bar, set_job
from shoal.policies.in_step import hand_out_in_step

#: A new bar is set this far below the gain of the holder that asked for it.
_BAR = 0.99


@njit(cache=True)
def hand_out(
    share: IntArray,
    remaining: FloatArray,
    speeds: FloatArray,
    at: IntArray,
    cap: IntArray,
    gpus: int,
) -> None:
    """Hand out `gpus` one by one among those that have a share below their cap, each to the winner of the fold."""
    gpus = hand_out_in_step(share, speeds, at, cap, gpus)
    rows, m = np.empty(len(share), np.int32), 0
    for r in range(len(share)):
        if 0 < share[r] < cap[r]:
            rows[m] = r
            m += 1
    if m == 0 or gpus == 0:
        return
    held, limit = np.empty(m, np.int32), np.empty(m, np.int32)
    begin, left = np.empty(m, np.int32), np.empty(m)
    need = 0
    for i in range(m):
        r = rows[i]
        held[i], limit[i], begin[i], left[i] = share[r], cap[r], at[r], remaining[r]
        need += limit[i] - held[i]
    if need <= gpus:
        for i in range(m):
            share[rows[i]] = limit[i]
        return
    jobs, blocks, groups = plant(held, limit, left, speeds, begin)
    bar, in_vain = np.inf, 0
    chain = np.empty(m + 1, np.int32)
    top = -1  # index of the chain's end
    # For each of the chain: the largest gains set against it by those after it, up to where it was searched.
    rivals = np.empty((m + 1, 2))
    first = 0  # all candidates before this one are at their cap
    start = 0  # where to look for the next one to beat the chain's end
    while gpus > 0:
        if top < 0:
            while jobs[SHORT, first] == -np.inf:
                first += 1
            chain[0], top, start = first, 0, first + 1
            rivals[0, 0] = rivals[0, 1] = -np.inf
        while start < m:  # extend the chain until nobody beats its end
            found, short, long_, looked_at = next_to_beat(jobs, blocks, groups, start, chain[top], bar)
            in_vain += looked_at
            if found < 0 and in_vain > m:
                bar, in_vain = jobs[LONG, chain[top]] * _BAR, 0
                set_bar(jobs, blocks, groups, bar)
            rivals[top, 0], rivals[top, 1] = max(rivals[top, 0], short), max(rivals[top, 1], long_)
            if found < 0:
                break
            top += 1
            chain[top], start = found, found + 1
            rivals[top, 0] = rivals[top, 1] = -np.inf
        w = chain[top]
        rival_short, rival_long = rivals[top, 0], rivals[top, 1]
        length_before, short_before, long_before = np.inf, -np.inf, -np.inf
        if top > 0:
            before = chain[top - 1]
            length_before = jobs[LENGTH, before]
            short_before, long_before = jobs[SHORT, before], jobs[LONG, before]
        was = speeds[begin[w] + held[w]]
        while True:
            held[w] += 1
            gpus -= 1
            if gpus == 0 or held[w] >= limit[w]:
                break
            now, then = speeds[begin[w] + held[w]], speeds[begin[w] + held[w] + 1]
            short, long_ = (then - now) / now, (then - now) / then
            # A winner that is no slower than before is no longer than before, so nobody who was longer has
            # become a shorter rival.
            if now < was or not (long_ > rival_short and short >= rival_long):
                break
            if not long_ > short_before and not (short >= long_before and left[w] / now <= length_before):
                break
        set_job(jobs, w, held[w], limit[w], left[w], speeds, begin[w])
        lift(jobs, blocks, groups, w, bar)
        # All before the winner lost to its predecessor, and still do: go on from the winner itself.
        top -= 1
        start = w
    for i in range(m):
        share[rows[i]] = held[i]
