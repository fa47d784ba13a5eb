"""Every fold of AFS hands out the GPUs up to a gap between gains first, whatever the lengths and the coins."""

from __future__ import annotations

import numpy as np
import pytest

from shoal.policies.afs.gains import hand_out_to_gap

from . import naive


def few_curves(seed, jobs=60):
    """Jobs of few curves that are interpolated between powers of two, as measured ones are, with several caps."""
    rng = np.random.default_rng(seed)
    knots = np.array([1, 2, 4, 8, 16])
    curves = []
    for _ in range(int(rng.integers(1, 6))):
        speed = np.interp(np.arange(1, 17), knots, np.cumprod([1, *rng.uniform(1.2, 1.95, 4)]))
        curves.append(np.array([0, *speed]))
    kind = rng.integers(len(curves), size=jobs)
    cap = rng.choice([4, 8, 16], jobs).astype(np.int32)
    gpus = int(rng.integers(1, cap.sum() - jobs + 20))
    return [curves[k] for k in kind], (17 * kind).astype(np.int32), np.concatenate(curves), cap, gpus


def naive_shares(remaining, curves, share, cap, gpus):
    """The fold of AFS-L for every GPU, from these shares."""
    share = share.tolist()
    for _ in range(gpus):
        holder = None
        for j in range(len(share)):
            if not 0 < share[j] < cap[j]:
                continue
            pair = curves[j][share[j]], curves[j][share[j] + 1]
            length = remaining[j] / pair[0]
            if holder is None or naive.afs_prefers_challenger(holder[1], pair, holder[2], length):
                holder = j, pair, length
        if holder is None:
            break
        share[holder[0]] += 1
    return share


def test_every_fold_passes_through_the_shares_at_a_gap():
    handed_out = left_over = 0
    for seed in range(60):
        curves, at, speeds, cap, gpus = few_curves(seed)
        rng = np.random.default_rng(seed)
        start = np.ones(len(cap), np.int32)
        start[rng.random(len(cap)) < 0.1] = 0
        start[rng.random(len(cap)) < 0.1] = 3
        share = start.copy()
        left = hand_out_to_gap(share, speeds, at, cap, gpus)
        assert share.sum() - start.sum() == gpus - left
        assert left >= 0
        lengths = [rng.lognormal(5, 2, len(cap)), np.full(len(cap), 7.0)]
        for remaining in lengths:
            assert naive_shares(remaining, curves, start, cap, gpus - left) == share.tolist(), f"seed {seed}"
        order = rng.permutation(np.flatnonzero(start))
        for tie in ("gain", "coin", "first", "last"):
            toss = lambda rng=rng: rng.random() < 0.5  # noqa: E731 - a fair coin
            got = naive.hand_out_without_lengths(start, curves, cap, gpus - left, tie, order, toss)
            assert got == share.tolist(), f"seed {seed}, tie={tie}"
        handed_out += gpus - left
        left_over += left if share.sum() < cap.sum() else 0
    assert left_over < handed_out, "gaps are that close on such curves"


def test_equal_gains_are_no_gap_because_the_lengths_decide():
    """From 2 to 3 GPUs as the shorter job gains as much as from 1 to 2 as the longer one: a half."""
    speeds, at, cap = np.array([0.0, 1.0, 2.0, 3.0, 3.1]), np.zeros(2, np.int32), np.full(2, 4, np.int32)
    share = np.ones(2, np.int32)
    assert hand_out_to_gap(share, speeds, at, cap, 3) == 3
    assert share.tolist() == [1, 1]
    assert hand_out_to_gap(share, speeds, at, cap, 5) == 1, "but the last GPU gains less"
    assert share.tolist() == [3, 3]


@pytest.mark.parametrize("gpus", [12, 13, 100])
def test_all_get_their_caps_where_these_fit(gpus):
    share, cap = np.array([1, 0, 4, 2], np.int32), np.array([8, 8, 4, 7], np.int32)
    speeds = np.arange(9.0) ** 0.7
    assert hand_out_to_gap(share, speeds, np.zeros(4, np.int32), cap, gpus) == gpus - 12
    assert share.tolist() == [8, 0, 4, 7]


def test_nothing_is_handed_out_where_every_job_has_its_own_curve():
    rng = np.random.default_rng(3)
    speeds = np.cumprod(rng.uniform(1.1, 1.3, (100, 5)), axis=1).ravel()
    share = np.ones(100, np.int32)
    at = (5 * np.arange(100)).astype(np.int32)
    assert hand_out_to_gap(share, speeds, at, np.full(100, 4, np.int32), 150) == 150
    assert share.tolist() == [1] * 100
