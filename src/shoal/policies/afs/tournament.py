"""The tournament of AFS-L: who gets the next GPU, one GPU after the other, in few comparisons.

Each GPU goes to the winner of a left fold over the candidates in order of submission: the first job holds,
and each further one takes over if it beats the holder. The relation is not transitive, so the order of the
fold is part of the rule, and no sorting can replace it. What makes it quick and still exact:

- The holders form a chain, each the first job after its predecessor that beats it. A grant changes only
  the winner, which is the chain's end, so the chain before it stands.
- The next job that beats a holder is found by what blocks of jobs, and blocks of blocks, carry (`candidates`).
  The bar of theirs follows the holders' gains down as they sink; it is set anew when the searches since have
  looked at too many in vain.
- A winner that gains no less by its next GPU than by the last one, and is no slower, wins again: it beats all
  that it beat before.
- Where all fit at their caps there is nothing to decide, nor is there before a gap between gains (`in_step`).
"""

from __future__ import annotations

import numpy as np

from shoal.core.arrays import FloatArray, IntArray
from shoal.core.compiled import kernel
from shoal.policies.afs.candidates import LENGTH, LONG, SHORT, lift, next_to_beat, plant, set_bar
from shoal.policies.afs.gains import gains
from shoal.policies.afs.in_step import hand_out_in_step
from shoal.policies.afs.lanes import fetch

#: A new bar is set this far below the gain of the holder that asked for it.
_BAR = 0.9


@kernel
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
    columns, begins = plant(held, limit, left, speeds, begin, False)
    bar, in_vain = np.inf, 0
    chain = np.empty(m + 1, np.int32)
    top = -1  # index of the chain's end
    first = 0  # all candidates before this one are at their cap
    start = 0  # where to look for the next one to beat the chain's end
    last = -1  # the last winner
    while gpus > 0:
        if top < 0:
            while columns[SHORT, first] == -np.inf:
                first += 1
            chain[0], top, start = first, 0, first + 1
        while start < m:  # extend the chain until nobody beats its end
            found, looked_at = next_to_beat(columns, begins, start, chain[top], bar)
            in_vain += looked_at
            if found < 0:
                break
            top += 1
            chain[top], start = found, found + 1
            fetch(speeds, begin[found] + held[found])
        if in_vain > m:
            bar, in_vain = columns[LONG, chain[top]] * _BAR, 0
            set_bar(columns, begins, bar)
        elif last >= 0:
            # All searches since were for those behind the last winner, so the blocks above it could wait.
            lift(columns, begins, last, bar)
        w = chain[top]
        now = speeds[begin[w] + held[w]]
        while True:
            held[w] += 1
            gpus -= 1
            short, long_ = gains(speeds, begin[w], held[w], limit[w])
            was, now = now, speeds[begin[w] + held[w]]
            if gpus == 0 or now < was or not (short >= columns[SHORT, w] and long_ >= columns[LONG, w]):
                break
        columns[LENGTH, w] = left[w] / now if held[w] < limit[w] else np.inf
        columns[SHORT, w], columns[LONG, w] = short, long_
        # All before the winner lost to its predecessor, and still do: go on from the winner itself.
        last, start = w, w
        top -= 1
    for i in range(m):
        share[rows[i]] = held[i]
