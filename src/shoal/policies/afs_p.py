"""Apathetic Future Share, lengths unknown."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numba import njit
from numpy.typing import NDArray

from shoal.core.errors import ShoalError
from shoal.core.view import View
from shoal.policies.base import CountPolicy, FloatArray, IntArray
from shoal.policies.types import reference_curves

_BLOCK = 32
_TIES = {"random": 0, "first": 1, "last": 2}


@njit(cache=True)
def hand_out_by_gain(
    share: IntArray,
    rows: IntArray,
    speeds: FloatArray,
    at: IntArray,
    cap: IntArray,
    gpus: int,
    tie: int,
    rng: np.random.Generator,
) -> None:
    """Hand out `gpus` one by one among `rows`, each to the winner of the fold of COMPARE.

    With n the share so far, F1 = p(n)/(p(n+1)-p(n)) and F2 = F1 + 1: the challenger m takes it from the
    holder c if F2(m) <= F1(c), c keeps it if F2(c) <= F1(m), and else it depends on the unknown lengths,
    so a coin is tossed. In gains g1 = 1/F1 and g2 = 1/F2: m if g2(m) >= g1(c); c if g2(c) >= g1(m).
    """
    m = len(rows)
    blocks = (m + _BLOCK - 1) // _BLOCK
    g1, g2, most = np.empty(m), np.empty(m), np.full(blocks, -np.inf)
    alive = 0
    for i in range(m):
        r = rows[i]
        _gains(i, share[r], cap[r], speeds, at[r], g1, g2)
        alive += share[r] < cap[r]
        most[i // _BLOCK] = max(most[i // _BLOCK], g1[i])
    first = 0
    while gpus > 0 and alive > 0:
        while g1[first] == -np.inf:
            first += 1
        c = first
        i = first + 1
        while i < m:
            if i % _BLOCK == 0:  # nobody in a block whose best gain cannot trouble the holder matters
                b = i // _BLOCK
                while b < blocks and not most[b] > g2[c]:
                    b += 1
                if b == blocks:
                    break
                i = b * _BLOCK
            end = min((i // _BLOCK + 1) * _BLOCK, m)
            while i < end:
                if g2[i] >= g1[c]:
                    c = i
                elif not g2[c] >= g1[i]:
                    if tie == 2 or (tie == 0 and rng.random() < 0.5):
                        c = i
                i += 1
        r = rows[c]
        share[r] += 1
        gpus -= 1
        _gains(c, share[r], cap[r], speeds, at[r], g1, g2)
        alive -= share[r] >= cap[r]
        b = c // _BLOCK
        top = -np.inf
        for k in range(b * _BLOCK, min(b * _BLOCK + _BLOCK, m)):
            top = max(top, g1[k])
        most[b] = top


@njit(cache=True, inline="always")
def _gains(
    i: int, share: int, cap: int, speeds: FloatArray, at: int, g1: FloatArray, g2: FloatArray
) -> None:
    if share >= cap:
        g1[i] = g2[i] = -np.inf
        return
    now, then = speeds[at + share], speeds[at + share + 1]
    g1[i] = (then - now) / now
    g2[i] = (then - now) / then


@njit(cache=True)
def afs_p_shares(
    others: IntArray,
    keep: NDArray[np.bool_],
    now_gpus: IntArray,
    speeds: FloatArray,
    at: IntArray,
    min_gpus: IntArray,
    max_gpus: IntArray,
    gpus: int,
    tie: int,
    rng: np.random.Generator,
) -> IntArray:
    """Kept jobs keep; `others`, in their order, get their minimum while it fits; the rest goes by gain."""
    n = len(keep)
    share = np.zeros(n, np.int32)
    left = gpus
    for j in range(n):
        if keep[j]:
            share[j] = now_gpus[j]
            left -= now_gpus[j]
    for j in others:
        if left <= 0:
            break
        if min_gpus[j] <= left:
            share[j] = min_gpus[j]
            left -= min_gpus[j]
    if left > 0:
        count = 0
        rows = np.empty(n, np.int32)
        for j in range(n):  # the fold goes in order of submission
            if not keep[j] and share[j] > 0 and share[j] < max_gpus[j]:
                rows[count] = j
                count += 1
        if count > 0:
            hand_out_by_gain(share, rows[:count], speeds, at, max_gpus, left, tie, rng)
    return share


@dataclass(frozen=True)
class AfsPOptions:
    #: How long a job keeps its share while jobs outnumber GPUs.
    quantum_s: float = 7200.0
    #: Who gets a GPU when it depends on the unknown lengths: random, first or last in order of submission.
    tie: str = "random"

    def __post_init__(self) -> None:
        if self.tie not in _TIES:
            raise ShoalError(f"option tie={self.tie!r} of policy 'afs-p' must be random, first or last")
        if not self.quantum_s > 0:
            raise ShoalError(f"option quantum_s={self.quantum_s} of policy 'afs-p' must be above 0")


class AfsP(CountPolicy):
    """AFS-P: AFS where nobody knows the lengths, by processor sharing (Hwang et al., NSDI'21).

    While there are fewer jobs than GPUs all are shared out anew at each event: everyone gets a GPU, and
    each further one goes to the job whose gain wins the rule of AFS whichever of the two is longer, a coin
    deciding where that depends on the lengths. With as many jobs as GPUs or more, a job that runs keeps its
    share until its quantum ends; the others follow in order of (quanta used, first start, arrival).

    Remembers of each job: `memory_a` when its quantum ends, `memory_b` how many quanta it has used.
    """

    name = "afs-p"
    summary = "AFS without knowing lengths: processor sharing plus gains (NSDI'21)"
    Options = AfsPOptions

    def shares(self, view: View, gpus: int, now_s: float) -> IntArray:
        n = len(view)
        keep = np.zeros(n, np.bool_)
        if n >= gpus:
            running = view.gpus > 0
            keep = running & (view.memory_a > now_s)
            view.memory_b[running & ~keep] += 1
            others = np.flatnonzero(~keep)
            key = np.lexsort((view.submit_s[others], view.first_start_s[others], view.memory_b[others]))
            others = others[key].astype(np.int32)
        else:
            others = np.arange(n, dtype=np.int32)
        shares = afs_p_shares(
            others,
            keep,
            view.gpus,
            view.speeds,
            reference_curves(view),
            view.min_gpus,
            view.max_gpus,
            gpus,
            _TIES[self.options.tie],
            self.rng,
        )
        view.memory_a[(shares > 0) & ~keep] = now_s + self.options.quantum_s
        return shares

    def wake_s(self, view: View, shares: IntArray, now_s: float) -> float:
        if len(view) < view.total_gpus or not (shares > 0).any():
            return np.inf
        return float(view.memory_a[shares > 0].min())
