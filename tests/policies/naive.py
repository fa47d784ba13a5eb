"""The rules in plain Python: the reference that the kernels must equal."""

from __future__ import annotations

import math
from functools import cache

import numpy as np

from shoal.core.job import GpuRange, Job
from shoal.core.profile import Profile, SpeedCurve
from shoal.core.view import View
from shoal.policies.afs.afs_p import AfsP

_64_BITS = (1 << 64) - 1


def afs_prefers_challenger(p_holder, p_challenger, length_holder, length_challenger):
    """AFS: (speed now, speed with one more) and remaining times of two jobs with shares."""
    holder, challenger = (*p_holder, length_holder), (*p_challenger, length_challenger)
    short, long = (holder, challenger) if holder[2] < challenger[2] else (challenger, holder)
    long_wins = (long[1] - long[0]) / long[1] > (short[1] - short[0]) / short[0]
    return (long is challenger) == long_wins


def afs_l(remaining, curves, least, most, gpus):
    """AFS-L from no shares: one left fold in order of submission for every GPU."""
    n = len(remaining)
    share = [0] * n

    def length(j, s):
        return remaining[j] / curves[j][s] if s and curves[j][s] else math.inf

    def prefers_challenger(holder, challenger):
        a, b = share[holder], share[challenger]
        if a == 0 and b == 0:
            return not length(holder, least[holder]) < length(challenger, least[challenger])
        if length(holder, a) >= length(challenger, b):
            short, long = challenger, holder
        else:
            short, long = holder, challenger
        s, t = share[short], share[long]
        p_long, p_long_more = (
            (curves[long][t], curves[long][t + 1]) if t else (0.0, curves[long][least[long]])
        )
        gain_long = (p_long_more - p_long) / p_long_more
        gain_short = (curves[short][s + 1] - curves[short][s]) / curves[short][s] if s else math.inf
        return (long if gain_long > gain_short else short) == challenger

    while gpus > 0:
        holder = None
        for j in range(n):
            if share[j] >= most[j] or (share[j] == 0 and least[j] > gpus):
                continue
            if holder is None or prefers_challenger(holder, j):
                holder = j
        if holder is None:
            break
        step = 1 if share[holder] else least[holder]
        share[holder] += step
        gpus -= step
    return share


def coins(seed):
    """The coin tosses of AFS-P: xorshift64. Each call is one toss: whether the challenger wins."""
    state = seed

    def toss():
        nonlocal state
        state ^= state << 13 & _64_BITS
        state ^= state >> 7
        state ^= state << 17 & _64_BITS
        return state >> 63 == 0

    return toss


def hand_out_without_lengths(share, curves, most, gpus, tie, order=None, toss=None):
    """AFS-P: one left fold of COMPARE, in this order, for every GPU; `tie` as in the policy's options."""
    share = list(share)
    candidates = [j for j in (range(len(share)) if order is None else order) if share[j] > 0]

    def gains_of(j):
        now, then = float(curves[j][share[j]]), float(curves[j][share[j] + 1])
        return (then - now) / now, (then - now) / then

    gains = {j: gains_of(j) for j in candidates if share[j] < most[j]}
    while gpus > 0 and gains:
        c = max(gains, key=lambda j: gains[j][0]) if tie == "gain" else next(iter(gains))
        for m in gains if tie != "gain" else ():
            if m == c:
                continue
            (c1, c2), (m1, m2) = gains[c], gains[m]
            if m2 >= c1:
                c = m
            elif c2 >= m1:
                pass
            elif tie == "last" or (tie == "coin" and toss()):
                c = m
        share[c] += 1
        gpus -= 1
        if share[c] < most[c]:
            gains[c] = gains_of(c)
        else:
            del gains[c]
    return share


def optimus(remaining, curves, least, most, gpus):
    """One GPU to the job whose remaining time it shortens most, the first of equals."""
    n = len(remaining)
    share = [0] * n
    for j in range(n):
        if least[j] <= gpus:
            share[j] = least[j]
            gpus -= least[j]
    while gpus > 0:
        best, best_gain = None, 0.0
        for j in range(n):
            if 0 < share[j] < most[j]:
                gain = remaining[j] / curves[j][share[j]] - remaining[j] / curves[j][share[j] + 1]
                if gain > best_gain:
                    best, best_gain = j, gain
        if best is None:
            break
        share[best] += 1
        gpus -= 1
    return share


def max_min(order, least, most, gpus):
    """Round robin: the minimum first, then the lowest share gets one more, in order."""
    share = [0] * len(order)
    for j in order:
        if least[j] <= gpus:
            share[j] = least[j]
            gpus -= least[j]
    level = 0
    while gpus > 0 and any(0 < share[j] < most[j] for j in order):
        level += 1
        for j in order:
            if gpus > 0 and 0 < share[j] < most[j] and share[j] <= level:
                share[j] += 1
                gpus -= 1
    return share


def in_order(order, want, gpus, backfill=True):
    share = [0] * len(want)
    for j in order:
        if want[j] <= gpus:
            share[j] = want[j]
            gpus -= want[j]
        elif not backfill:
            break
    return share


def grant_in_order(order, least, most, gpus):
    """Themis: one job after the other gets the free GPUs, up to its demand."""
    share = [0] * len(most)
    for j in order:
        take = min(most[j], gpus)
        if take and take >= least[j]:
            share[j] = take
            gpus -= take
    return share


def gittins(service, attained):
    """sup over d of P(S - a <= d | S > a) / E[min(S - a, d) | S > a], by trying each d."""
    left = [s - attained for s in service if s > attained]
    return max((sum(x <= d for x in left) / sum(min(x, d) for x in left) for d in left), default=0.0)


# -- random views --------------------------------------------------------------------------------------


def random_curve(rng: np.random.Generator, longest: int) -> np.ndarray:
    """Speeds that rise: concave, or interpolated in time (convex in pieces), or with flat stretches."""
    kind = rng.integers(4)
    n = np.arange(longest + 1, dtype=float)
    if kind == 0:
        speed = n ** rng.uniform(0.1, 0.99)
    elif kind == 1:
        knots = np.unique(np.concatenate([[1, longest], rng.integers(1, longest + 1, 4)]))
        times = np.sort(rng.uniform(0.1, 5, len(knots)))[::-1]
        speed = np.concatenate([[0], 1 / np.interp(n[1:], knots, times)])
    elif kind == 2:
        speed = np.concatenate([[0], np.cumsum(rng.choice([0.0, 0.0, 0.3, 1.0], longest) + 1e-12)])
        speed[1:] += 1
    else:  # a second GPU that more than doubles the speed
        speed = n ** rng.uniform(1.0, 1.4)
    speed[0] = 0
    return speed * rng.uniform(0.01, 100)


@cache
def random_view(
    seed: int, *, min_one: bool = False, doubling: bool = True, jobs: int = 40, most_gpus: int = 120
) -> tuple[View, int]:
    """A view of up to this many jobs with curves of all kinds, and a number of GPUs. It is cached: do not change it."""
    rng = np.random.default_rng(seed)
    n, gpus = int(rng.integers(1, jobs)), int(rng.integers(1, most_gpus))
    view = View(("gpu",), gpus, AfsP.columns)
    pool = []
    while len(pool) < 8:
        curve = random_curve(rng, int(rng.integers(1, 40)))
        if doubling or len(curve) < 3 or curve[2] < 2 * curve[1]:
            pool.append(Profile("m", {"*": {0: SpeedCurve(curve)}}))
    for i in range(n):
        profile = pool[rng.integers(len(pool))]
        longest = profile.curve("gpu").max_gpus
        most = int(rng.integers(1, longest + 1))
        useful = int(np.argmax(profile.curve("gpu").speed[: min(most, gpus) + 1]))
        least = 1 if min_one else int(rng.integers(1, useful + 1))
        # Few different lengths, so that some are equal.
        work = float(rng.choice([10.0, 100.0, rng.lognormal(5, 2)]))
        want = int(rng.integers(least, most + 1))
        view.add(i, Job(f"j{i}", 0.0, GpuRange(least, most), want, iterations=work), profile, 0, 0.0)
    return view, gpus


def curves_of(view: View) -> list[np.ndarray]:
    return [view.speeds[a : a + m + 2].copy() for a, m in zip(view.speed_at[0], view.max_gpus)]
