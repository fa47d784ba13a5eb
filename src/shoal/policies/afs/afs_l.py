"""Apathetic Future Share, lengths known."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shoal.core.arrays import FloatArray, IntArray
from shoal.core.compiled import kernel
from shoal.core.errors import ShoalError
from shoal.core.stable_order import stable_order
from shoal.core.view import View
from shoal.policies.afs.tournament import hand_out
from shoal.policies.afs.tournament_from_zero import hand_out_from_zero
from shoal.policies.base import CountPolicy
from shoal.policies.order import times_at
from shoal.policies.types import reference_curves


@kernel
def first_shares(
    remaining: FloatArray,
    speeds: FloatArray,
    at: IntArray,
    min_gpus: IntArray,
    max_gpus: IntArray,
    gpus: int,
    share: IntArray,
) -> int:
    """Everyone's first GPUs, as far as they go; returns how many GPUs are left.

    If nobody's next GPU doubles its speed, a job without a share goes before all that have one, and among
    those without the shortest goes first (the later one of two that are equal). Else this rule does not say
    who goes first, nothing is given and -1 is returned for what is left: see `hand_out_from_zero`.
    """
    n, need = len(remaining), 0
    for j in range(n):
        need += min_gpus[j]
        a = at[j] + min_gpus[j]
        if min_gpus[j] < max_gpus[j] and not speeds[a + 1] < 2 * speeds[a]:
            return -1
    if need <= gpus:
        for j in range(n):
            share[j] = min_gpus[j]
        return gpus - need
    start = np.empty(n)
    for j in range(n):
        start[n - 1 - j] = remaining[j] / speeds[at[j] + min_gpus[j]]
    left = gpus
    for k in stable_order(start):
        j = n - 1 - k
        if min_gpus[j] <= left:
            share[j] = min_gpus[j]
            left -= min_gpus[j]
            if left == 0:
                break
    return left


@kernel
def _give_first_and_further(
    remaining: FloatArray,
    speeds: FloatArray,
    at: IntArray,
    min_gpus: IntArray,
    max_gpus: IntArray,
    gpus: int,
    share: IntArray,
) -> int:
    """All GPUs, where everyone's first ones can be told at once; else none, and -1 is returned."""
    left = first_shares(remaining, speeds, at, min_gpus, max_gpus, gpus, share)
    if left > 0:
        hand_out(share, remaining, speeds, at, max_gpus, left)
    return left


def _afs_l_shares(
    remaining: FloatArray,
    speeds: FloatArray,
    at: IntArray,
    min_gpus: IntArray,
    max_gpus: IntArray,
    gpus: int,
) -> IntArray:
    """Shares of AFS-L for jobs in order of submission; `speeds[at[j] + n]` is the speed of j with n GPUs."""
    share = np.zeros(len(remaining), np.int32)
    if _give_first_and_further(remaining, speeds, at, min_gpus, max_gpus, gpus, share) < 0:
        left = hand_out_from_zero(share, remaining, speeds, at, min_gpus, max_gpus, gpus)
        if left > 0:
            hand_out(share, remaining, speeds, at, max_gpus, left)
    return share


#: For other kernels. `AfsL` itself runs it as it stands, so that only what a cluster needs is compiled.
afs_l_shares = kernel(_afs_l_shares)


_FOLDS = ("submission", "shortest")


@dataclass(frozen=True)
class AfsLOptions:
    #: The order in which jobs are compared: by submission, as the authors' results are made with, or the
    #: shortest remaining time (at the minimum share) first.
    fold: str = "submission"

    def __post_init__(self) -> None:
        if self.fold not in _FOLDS:
            raise ShoalError(f"option fold={self.fold!r} of policy 'afs-l' must be {' or '.join(_FOLDS)}")


class AfsL(CountPolicy):
    """AFS-L: each GPU goes to the job that the rule prefers, from no shares, at every event.

    Let a be the job with the shorter remaining time L = r/p at the present shares and b the longer one, p
    the speed now and p' with one GPU more. The GPU goes to b iff

        (p'_b - p_b) / p'_b  >  (p'_a - p_a) / p_a,

    else to a: efficiency against shortness, with b's future rate taken to be just its own p'_b, the
    "apathetic future" (Hwang et al., NSDI'21). Of two jobs without a share the shorter at its first GPUs
    goes first. The relation is not transitive, so it matters in which order the candidates are compared: a
    left fold in order of submission, or as `fold` says. Jobs at their maximum take no part.
    """

    name = "afs-l"
    summary = "short against efficient jobs, GPU by GPU; lengths known (AFS, NSDI'21)"
    needs_lengths = True
    takes_unknown_lengths = False
    Options = AfsLOptions

    def shares(self, view: View, gpus: int, now_s: float) -> IntArray:
        left, (at, most) = view.remaining_now(now_s), reference_curves(view)
        if self.options.fold == "submission":
            return _afs_l_shares(left, view.speeds, at, view.min_gpus, most, gpus)
        rows = np.argsort(times_at(left, view.speeds, at, view.min_gpus), kind="stable")
        shares = np.empty(len(view), np.int32)
        shares[rows] = _afs_l_shares(left[rows], view.speeds, at[rows], view.min_gpus[rows], most[rows], gpus)
        return shares

    def evidence(self, view: View, row: int, now_s: float) -> dict[str, float | int | str]:
        return marginal_evidence(view, row, view.remaining_now(now_s))


def marginal_evidence(view: View, row: int, remaining: NDArray[np.float64]) -> dict[str, float | int | str]:
    """Remaining time now, and what one GPU more of its type would make of the speed."""
    gpus, gpu_type = view.gpus[row], view.gpu_type[row]
    evidence: dict[str, float | int | str] = {}
    if not gpus:
        return evidence
    at = view.speed_at[gpu_type, row]
    now = view.speeds[at + gpus]
    if now > 0:
        if np.isfinite(remaining[row]):
            evidence["remaining_s"] = float(remaining[row] / now)
        if gpus < view.type_max[gpu_type, row]:
            evidence["next_gpu_gain"] = float(view.speeds[at + gpus + 1] / now - 1)
    return evidence
