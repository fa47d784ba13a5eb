"""Apathetic Future Share with unknown job lengths (AFS-P)."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from shoal.core.arrays import BoolArray, FloatArray, IntArray
from shoal.core.compiled import inlined, kernel
from shoal.core.errors import ShoalError
from shoal.core.options import at_least_a_second
from shoal.core.view import View
from shoal.core.words import spoken
from shoal.policies.afs.gains import gains, hand_out_to_gap
from shoal.policies.base import CountPolicy
from shoal.policies.gpu_types import reference_curves

#: Ties that a comparison decides: the probability that the challenger wins. `random` is an older name of `coin`.
_CHALLENGER_WINS = {"coin": 0.5, "random": 0.5, "first": 0.0, "last": 1.0}


@kernel
def start_in_order(
    others: IntArray, keep: BoolArray, now_gpus: IntArray, min_gpus: IntArray, gpus: int
) -> tuple[IntArray, IntArray, int]:
    """Jobs in `keep` keep their shares. `others`, in their order, get their minimum if it is still free.

    Return all shares, the rows of `others` that have one, and the number of GPUs left.
    """
    share, left = np.zeros(len(keep), np.int32), gpus
    for j in range(len(keep)):
        if keep[j]:
            share[j] = now_gpus[j]
            left -= now_gpus[j]
    started, count = np.empty(len(others), np.int32), 0
    for j in others:
        if min_gpus[j] <= left:
            share[j] = min_gpus[j]
            left -= min_gpus[j]
            started[count] = j
            count += 1
    return share, started[:count], left


@kernel
def hand_out_by_gain(
    share: IntArray, rows: IntArray, speeds: FloatArray, at: IntArray, cap: IntArray, gpus: int
) -> None:
    """Hand out GPUs one by one among `rows`, each to the job with the largest gain, the first of equal ones."""
    heap = [(np.inf, 0) for _ in range(0)]
    for i in range(len(rows)):
        r = rows[i]
        if share[r] < cap[r]:
            heap.append((-gains(speeds, at[r], share[r], cap[r])[0], i))
    heapq.heapify(heap)
    while gpus > 0 and len(heap) > 0:
        i = heap[0][1]
        r = rows[i]
        share[r] += 1
        gpus -= 1
        if share[r] < cap[r]:
            heapq.heapreplace(heap, (-gains(speeds, at[r], share[r], cap[r])[0], i))
        else:
            heapq.heappop(heap)


@kernel
def hand_out_by_fold(
    share: IntArray,
    rows: IntArray,
    speeds: FloatArray,
    at: IntArray,
    cap: IntArray,
    gpus: int,
    challenger_wins: float,
    seed: int,
) -> None:
    """Hand out GPUs one by one among `rows`, each to the winner of a left fold of COMPARE over them (see `AfsP`).

    A tie goes to the challenger with the probability `challenger_wins`. Coins are xorshift64 numbers
    (Marsaglia, 2003) that start from `seed`, which is above 0.
    """
    n, coin = len(rows), np.uint64(seed)
    limit = np.uint64(challenger_wins * 2.0**63)  # half a coin is below it with this probability
    short, long_ = np.empty(n), np.empty(n)
    for i in range(n):
        short[i], long_[i] = gains(speeds, at[rows[i]], share[rows[i]], cap[rows[i]])
    for _ in range(gpus):
        winner = -1
        for i in range(n):
            if short[i] == -np.inf:  # at its cap
                continue
            if winner < 0 or long_[i] >= short[winner]:
                winner = i
            elif long_[winner] < short[i]:
                coin = _next_coin(coin)
                if coin >> np.uint64(1) < limit:
                    winner = i
        if winner < 0:
            break
        r = rows[winner]
        share[r] += 1
        short[winner], long_[winner] = gains(speeds, at[r], share[r], cap[r])


@inlined
def _next_coin(coin: np.uint64) -> np.uint64:
    coin ^= coin << np.uint64(13)
    coin ^= coin >> np.uint64(7)
    coin ^= coin << np.uint64(17)
    return coin


@kernel
def _first_quantum_end_s(ends_s: FloatArray, share: IntArray, now_s: float, new_end_s: float) -> float:
    """When the first quantum of a running job ends. A job whose quantum is over begins a new one."""
    first = np.inf
    for j in range(len(share)):
        if share[j] > 0:
            if ends_s[j] <= now_s:
                ends_s[j] = new_end_s
            first = min(first, ends_s[j])
    return first


@dataclass(frozen=True)
class AfsPOptions:
    #: How long a job keeps its share while there are at least as many jobs as GPUs.
    quantum_s: float = 7200.0
    #: Tie-break where the rule depends on the unknown lengths: the larger gain (gain), a coin toss as in the
    #: authors' simulator (coin), or the job that comes first or last in the order of comparison (first, last).
    tie: str = "gain"

    def __post_init__(self) -> None:
        if self.tie != "gain" and self.tie not in _CHALLENGER_WINS:
            raise ShoalError(f"option tie={self.tie!r} of policy 'afs-p' must be gain, coin, first or last")
        at_least_a_second("quantum_s", self.quantum_s, "afs-p")


class AfsP(CountPolicy):
    """AFS-P (Hwang et al., NSDI'21): AFS for unknown job lengths, by processor sharing.

    While there are fewer jobs than GPUs, all shares are computed anew at each event. Every job gets a GPU.
    Each further GPU goes to the winner of a left fold of COMPARE over the jobs, in the order (quanta used,
    first start, arrival). With p the current speed and p' the speed with one more GPU,

        COMPARE(c, m) = m if F2(m) <= F1(c);  c if F2(c) <= F1(m);  else a tie,
        F1 = p / (p' - p),  F2 = p' / (p' - p).

    In the first two cases the rule of AFS-L prefers the same job whichever of the two is longer; in a tie it
    depends on the lengths. With at least as many jobs as GPUs, a running job keeps its share until its
    quantum ends, and the other jobs follow in the same order.

    `tie=gain` breaks ties in favour of the larger gain p'/p - 1 = 1/F1. If F2(m) <= F1(c) then F1(m) < F1(c),
    so COMPARE then always prefers the larger gain. The jobs are ordered by one number, and by position where
    it is equal: a total order, so a heap replaces the fold. `tie=coin` is the authors' rule: a coin toss.

    State of each job: when its quantum ends and how many quanta it has used.
    """

    name = "afs-p"
    uses_speeds = True
    columns = ("quantum_end_s", "quanta_used")
    summary = "AFS without knowing lengths: processor sharing plus gains (NSDI'21)"
    Options = AfsPOptions

    @property
    def quantum(self) -> str:
        return (
            f"a job keeps its GPUs for a quantum of {spoken(self.options.quantum_s)}, then others have a turn"
        )

    def shares(self, view: View, gpus: int, now_s: float) -> IntArray:
        keep = np.zeros(len(view), np.bool_)
        if len(view) >= gpus:
            running = view.gpus > 0
            fits = (view.gpus >= view.min_gpus) & (view.gpus <= view.max_gpus)
            keep = running & fits & (view.column("quantum_end_s") > now_s)
            view.column("quanta_used")[running & ~keep] += 1
        order = np.lexsort((view.first_start_s, view.column("quanta_used"))).astype(np.int32)
        at, most = reference_curves(view)
        share, started, left = start_in_order(order[~keep[order]], keep, view.gpus, view.min_gpus, gpus)
        if not keep.any():
            left = hand_out_to_gap(share, view.speeds, at, most, left)
        self._hand_out(share, started, view.speeds, at, most, left)
        if keep.any():
            # GPUs that the others cannot use go to the jobs that keep their shares, so that none is idle.
            kept = np.flatnonzero(keep).astype(np.int32)
            self._hand_out(share, kept, view.speeds, at, most, gpus - int(share.sum()))
        view.column("quantum_end_s")[(share > 0) & ~keep] = now_s + self.options.quantum_s
        return share

    def _hand_out(
        self, share: IntArray, rows: IntArray, speeds: FloatArray, at: IntArray, cap: IntArray, gpus: int
    ) -> None:
        if gpus <= 0:
            return
        if self.options.tie == "gain":
            hand_out_by_gain(share, rows, speeds, at, cap, gpus)
        else:
            odds, seed = _CHALLENGER_WINS[self.options.tie], int(self.rng.integers(1, 1 << 62))
            hand_out_by_fold(share, rows, speeds, at, cap, gpus, odds, seed)

    def wake_s(self, view: View, shares: IntArray, now_s: float) -> float:
        end_s = now_s + self.options.quantum_s
        return float(_first_quantum_end_s(view.column("quantum_end_s"), shares, now_s, end_s))
