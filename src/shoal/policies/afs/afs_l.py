"""Apathetic Future Share with known job lengths (AFS-L)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shoal.core.arrays import FloatArray, IntArray
from shoal.core.compiled import inlined, kernel
from shoal.core.errors import ShoalError
from shoal.core.stable_order import stable_order
from shoal.core.view import View
from shoal.policies.afs.gains import gains, hand_out_to_gap
from shoal.policies.base import CountPolicy
from shoal.policies.gpu_types import reference_curves
from shoal.policies.order import times_at


@kernel
def start_shortest_first(
    remaining: FloatArray,
    speeds: FloatArray,
    at: IntArray,
    min_gpus: IntArray,
    max_gpus: IntArray,
    gpus: int,
    share: IntArray,
) -> int:
    """Give jobs their minimum, the shortest job first (of equal jobs the later one); return the GPUs left.

    This is what the rule does unless some job's second step at least doubles its speed: a job without a
    share then precedes every job that has one. If there is such a job, nothing is given.
    """
    n = len(remaining)
    for j in range(n):
        a = at[j] + min_gpus[j]
        if min_gpus[j] < max_gpus[j] and speeds[a + 1] >= 2 * speeds[a]:
            return gpus
    length = np.empty(n)
    for j in range(n):  # in reverse, so that the later of equal jobs comes first
        length[n - 1 - j] = remaining[j] / speeds[at[j] + min_gpus[j]]
    for k in stable_order(length):
        j = n - 1 - k
        if min_gpus[j] <= gpus:
            share[j] = min_gpus[j]
            gpus -= min_gpus[j]
    return gpus


@kernel
def hand_out_by_length(
    share: IntArray,
    remaining: FloatArray,
    speeds: FloatArray,
    at: IntArray,
    min_gpus: IntArray,
    max_gpus: IntArray,
    gpus: int,
) -> None:
    """Hand out GPUs one by one, each to the winner of a left fold of the rule over the jobs, in row order.

    The first step of a job without a share is its minimum. It takes part while that many GPUs are left. It is
    longer than every job with a share, and gains 1 as the longer job.

    The fold is not repeated in full. `chain` holds its successive winners. The GPU that is handed out changes
    only the last of them, so the next fold continues there, with the winner before it.
    """
    n = len(share)
    length, short, long_ = np.empty(n), np.empty(n), np.empty(n)
    for j in range(n):
        length[j], short[j], long_[j] = _terms(
            remaining[j], speeds, at[j], share[j], min_gpus[j], max_gpus[j]
        )
    chain, top, j = np.empty(n, np.int32), -1, 0
    largest_min = gpus + 1  # of the jobs without a share; unknown at first
    while gpus > 0:
        if gpus < largest_min:
            largest_min, top, j = 0, -1, 0
            for i in range(n):
                if share[i] == 0 and min_gpus[i] > gpus:
                    short[i] = long_[i] = -np.inf
                elif share[i] == 0:
                    largest_min = max(largest_min, min_gpus[i])
        while j < n:
            if top < 0:
                wins = short[j] > -np.inf
            elif _is_longer(j, chain[top], share, length):
                wins = long_[j] > short[chain[top]]
            else:
                wins = short[j] >= long_[chain[top]]
            if wins:
                top += 1
                chain[top] = j
            j += 1
        if top < 0:
            break
        w = chain[top]
        step = 1 if share[w] > 0 else min_gpus[w]
        share[w] += step
        gpus -= step
        length[w], short[w], long_[w] = _terms(
            remaining[w], speeds, at[w], share[w], min_gpus[w], max_gpus[w]
        )
        top, j = top - 1, w


@inlined
def _terms(
    remaining: float, speeds: FloatArray, at: int, gpus: int, least: int, cap: int
) -> tuple[float, float, float]:
    """Remaining time (without a share: at the minimum), and the gains as the shorter and as the longer job."""
    if gpus >= cap:
        return 0.0, -np.inf, -np.inf
    if gpus == 0:
        return remaining / speeds[at + least], np.inf, 1.0
    short, long_ = gains(speeds, at, gpus, cap)
    return remaining / speeds[at + gpus], short, long_


@inlined
def _is_longer(a: int, b: int, share: IntArray, length: FloatArray) -> bool:
    """Whether job a has more time remaining than job b; a job without a share has more than one with a share."""
    if (share[a] == 0) != (share[b] == 0):
        return bool(share[a] == 0)
    return bool(length[a] > length[b])


@kernel
def afs_l_shares(
    remaining: FloatArray,
    speeds: FloatArray,
    at: IntArray,
    min_gpus: IntArray,
    max_gpus: IntArray,
    gpus: int,
) -> IntArray:
    """Shares of AFS-L for jobs in order of submission; `speeds[at[j] + n]` is the speed of job j with n GPUs."""
    share = np.zeros(len(remaining), np.int32)
    left = start_shortest_first(remaining, speeds, at, min_gpus, max_gpus, gpus, share)
    left = hand_out_to_gap(share, speeds, at, max_gpus, left)
    hand_out_by_length(share, remaining, speeds, at, min_gpus, max_gpus, left)
    return share


_FOLDS = ("submission", "shortest")


@dataclass(frozen=True)
class AfsLOptions:
    #: The order in which jobs are compared: by submission, as in the authors' simulator, or by remaining time
    #: at the minimum share, shortest first.
    fold: str = "submission"

    def __post_init__(self) -> None:
        if self.fold not in _FOLDS:
            raise ShoalError(f"option fold={self.fold!r} of policy 'afs-l' must be {' or '.join(_FOLDS)}")


class AfsL(CountPolicy):
    """AFS-L (Hwang et al., NSDI'21): balance short jobs against efficient jobs, GPU by GPU.

    At every event all shares are computed anew, from zero. Each GPU goes to the job that the rule prefers.
    Let a be the job with the shorter remaining time L = r / p at the current shares and b the longer one, p the
    current speed and p' the speed with one more GPU. The GPU goes to b if

        (p'_b - p_b) / p'_b  >  (p'_a - p_a) / p_a,

    and to a otherwise. The rule assumes that b keeps the speed p'_b in the future: the "apathetic future". Of two
    jobs without a share, the one that is shorter at its minimum share is preferred. A job at its maximum
    takes no part.

    The rule is not transitive, so the order of comparison matters. It is a left fold: the first job is the
    candidate, and each later job replaces the candidate if the rule prefers it. Jobs are compared in the
    order that `fold` selects.
    """

    name = "afs-l"
    uses_speeds = True
    summary = "short against efficient jobs, GPU by GPU; lengths known (AFS, NSDI'21)"
    needs_lengths = True
    takes_unknown_lengths = False
    Options = AfsLOptions

    def shares(self, view: View, gpus: int, now_s: float) -> IntArray:
        left, (at, most) = view.remaining_now(now_s), reference_curves(view)
        if self.options.fold == "submission":
            return afs_l_shares(left, view.speeds, at, view.min_gpus, most, gpus)
        rows = np.argsort(times_at(left, view.speeds, at, view.min_gpus), kind="stable")
        shares = np.empty(len(view), np.int32)
        shares[rows] = afs_l_shares(left[rows], view.speeds, at[rows], view.min_gpus[rows], most[rows], gpus)
        return shares

    def evidence(self, view: View, row: int, now_s: float) -> dict[str, float | int | str]:
        return marginal_evidence(view, row, view.remaining_now(now_s))


def marginal_evidence(view: View, row: int, remaining: FloatArray) -> dict[str, float | int | str]:
    """Remaining time at the current share, and the relative speedup that one more GPU of its type would bring."""
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
