"""Apathetic Future Share, lengths unknown."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shoal.core.arrays import FloatArray, IntArray
from shoal.core.compiled import kernel
from shoal.core.errors import ShoalError
from shoal.core.options import at_least_a_second
from shoal.core.view import View
from shoal.policies.afs.coins import BY_COIN, FIRST, LARGEST, LAST
from shoal.policies.afs.in_step import hand_out_in_step
from shoal.policies.afs.tournament_by_gain import hand_out_by_gain
from shoal.policies.afs.tournament_of_classes import hand_out_among_alike
from shoal.policies.base import CountPolicy
from shoal.policies.types import reference_curves

_TIES = {"random": BY_COIN, "first": FIRST, "last": LAST, "gain": LARGEST}


@kernel
def starting_shares(
    others: IntArray, keep: NDArray[np.bool_], now_gpus: IntArray, min_gpus: IntArray, gpus: int
) -> tuple[IntArray, IntArray, int]:
    """Kept jobs keep; `others`, in their order, get their minimum while it fits.

    Returns all shares, those of the others that have one, and how many GPUs are left.
    """
    share, left = np.zeros(len(keep), np.int32), gpus
    for j in range(len(keep)):
        if keep[j]:
            share[j] = now_gpus[j]
            left -= now_gpus[j]
    started, count = np.empty(len(others), np.int32), 0
    for j in others:
        if left <= 0:
            break
        if min_gpus[j] <= left:
            share[j] = min_gpus[j]
            left -= min_gpus[j]
            started[count] = j
            count += 1
    return share, started[:count], left


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
    nonce: int,
) -> IntArray:
    """Kept jobs keep, the others get their minimum while it fits, and the rest goes by gain.

    Not compiled as a whole, so that the tournament of jobs that are not alike is compiled only where there are some.
    """
    share, started, left = starting_shares(others, keep, now_gpus, min_gpus, gpus)
    curves, chance = (speeds, at, max_gpus), (tie, nonce)
    if len(others) == len(share):
        left = hand_out_in_step(share, *curves, left)
        _hand_out(share, started, *curves, left, *chance)
    else:
        _hand_out(share, started, *curves, left, *chance)
        # What the others cannot use goes to those who keep their shares: no GPU idles that anyone could use.
        left = gpus - int(share.sum())
        _hand_out(share, np.flatnonzero(keep).astype(np.int32), *curves, left, *chance)
    return share


def _hand_out(
    share: IntArray,
    rows: IntArray,
    speeds: FloatArray,
    at: IntArray,
    max_gpus: IntArray,
    gpus: int,
    tie: int,
    nonce: int,
) -> None:
    """GPUs to these rows, which all have a share, by gain."""
    if gpus > 0 and tie != LARGEST:
        gpus = hand_out_among_alike(share, rows, speeds, at, max_gpus, gpus, tie, nonce)
    if gpus > 0:
        hand_out_by_gain(share, rows, speeds, at, max_gpus, gpus, tie, nonce)


@kernel
def _in_turn(turns: FloatArray, first_start_s: FloatArray) -> bool:
    """Whether rows, in order of submission, are in order of turns used and of their first start, too."""
    for j in range(1, len(turns)):
        if turns[j] < turns[j - 1] or (turns[j] == turns[j - 1] and first_start_s[j] < first_start_s[j - 1]):
            return False
    return True


@kernel
def _begin_quanta(ends_s: FloatArray, share: IntArray, keep: NDArray[np.bool_], end_s: float) -> None:
    for j in range(len(share)):
        if share[j] > 0 and not keep[j]:
            ends_s[j] = end_s


@kernel
def _first_end(ends_s: FloatArray, share: IntArray, now_s: float, end_s: float) -> float:
    """When the first quantum ends. Who runs on what its type left idle begins one, too."""
    first = np.inf
    for j in range(len(share)):
        if share[j] > 0:
            if ends_s[j] <= now_s:
                ends_s[j] = end_s
            first = min(first, ends_s[j])
    return first


@dataclass(frozen=True)
class AfsPOptions:
    #: How long a job keeps its share while jobs outnumber GPUs.
    quantum_s: float = 7200.0
    #: Who gets a GPU when it depends on the unknown lengths: by a coin (random), the first or last of the fold, or
    #: who gains most (gain), which is an order and quick whatever the speed curves.
    tie: str = "random"

    def __post_init__(self) -> None:
        if self.tie not in _TIES:
            raise ShoalError(f"option tie={self.tie!r} of policy 'afs-p' must be random, first, last or gain")
        at_least_a_second("quantum_s", self.quantum_s, "afs-p")


class AfsP(CountPolicy):
    """AFS-P: AFS where nobody knows the lengths, by processor sharing (Hwang et al., NSDI'21).

    While there are fewer jobs than GPUs all are shared out anew at each event: everyone gets a GPU, and
    each further one goes to the winner of a left fold, in order of (quanta used, first start, arrival), of

        COMPARE(c, m) = m if F2(m) <= F1(c);  c if F2(c) <= F1(m);  else a coin,
        F1 = p / (p' - p),  F2 = p' / (p' - p),

    that is, to the job whose gain wins the rule of AFS whichever of the two is longer, a coin deciding
    where that depends on the unknown lengths. With as many jobs as GPUs or more, a job that runs keeps its
    share until its quantum ends; the others follow in the same order.

    State of each job: when its quantum ends and how many quanta it has used.
    """

    name = "afs-p"
    columns = ("quantum_end_s", "quanta_used")
    summary = "AFS without knowing lengths: processor sharing plus gains (NSDI'21)"
    Options = AfsPOptions

    def shares(self, view: View, gpus: int, now_s: float) -> IntArray:
        n = len(view)
        keep = np.zeros(n, np.bool_)
        if n >= gpus:
            running = view.gpus > 0
            fits = (view.gpus >= view.min_gpus) & (view.gpus <= view.max_gpus)
            keep = running & fits & (view.column("quantum_end_s") > now_s)
            view.column("quanta_used")[running & ~keep] += 1
        others = np.arange(n, dtype=np.int32)
        if not _in_turn(view.column("quanta_used"), view.first_start_s):
            others = np.lexsort((view.first_start_s, view.column("quanta_used"))).astype(np.int32)
        at, most = reference_curves(view)
        tie, nonce = _TIES[self.options.tie], int(self.rng.integers(1 << 62))
        if keep.any():
            others = others[~keep[others]]
        shares = afs_p_shares(others, keep, view.gpus, view.speeds, at, view.min_gpus, most, gpus, tie, nonce)
        _begin_quanta(view.column("quantum_end_s"), shares, keep, now_s + self.options.quantum_s)
        return shares

    def wake_s(self, view: View, shares: IntArray, now_s: float) -> float:
        return float(_first_end(view.column("quantum_end_s"), shares, now_s, now_s + self.options.quantum_s))
