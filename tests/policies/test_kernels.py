"""Every kernel equals the rule in plain Python on random views."""

from __future__ import annotations

import numpy as np
import pytest

from shoal.policies.afs.afs_l import AfsL, AfsLOptions, afs_l_shares
from shoal.policies.afs.afs_p import AfsP, AfsPOptions, hand_out_by_fold, hand_out_by_gain
from shoal.policies.afs.gains import hand_out_to_gap
from shoal.policies.fifo import fifo_shares
from shoal.policies.gittins import TiresiasG, TiresiasGOptions
from shoal.policies.max_min import max_min_shares
from shoal.policies.optimus.optimus import optimus_shares
from shoal.policies.order import fill_in_order, times_at
from shoal.policies.themis import grant_in_order

from . import naive

VIEWS = range(1000)


def test_afs_l_equals_a_left_fold_for_every_gpu():
    for seed in VIEWS:
        view, gpus = naive.random_view(seed, doubling=seed % 3 == 0)
        got = afs_l_shares(view.remaining, view.speeds, view.speed_at[0], view.min_gpus, view.max_gpus, gpus)
        want = naive.afs_l(view.remaining, naive.curves_of(view), view.min_gpus, view.max_gpus, gpus)
        assert got.tolist() == want, f"seed {seed}"


def test_afs_l_compares_the_shortest_first_with_that_option():
    policy, others = AfsL(AfsLOptions(fold="shortest")), 0
    for seed in VIEWS:
        view, gpus = naive.random_view(seed, doubling=seed % 3 == 0)
        curves = naive.curves_of(view)
        at_least = [view.remaining[j] / curves[j][view.min_gpus[j]] for j in range(len(view))]
        order = sorted(range(len(view)), key=at_least.__getitem__)
        folded = naive.afs_l(
            *(
                [values[j] for j in order]
                for values in (view.remaining, curves, view.min_gpus, view.max_gpus)
            ),
            gpus,
        )
        want = [folded[order.index(j)] for j in range(len(view))]
        assert policy.shares(view, gpus, view.now_s).tolist() == want, f"seed {seed}"
        others += want != AfsL().shares(view, gpus, view.now_s).tolist()
    assert others, "the order must matter in some views"


def test_afs_l_equals_a_left_fold_where_every_gpu_adds_as_much_as_the_first_or_more():
    """Jobs without a share always compete with jobs whose next GPU doubles their speed."""
    for seed in range(200):
        rng = np.random.default_rng(seed)
        n, kinds, gpus = int(rng.integers(1, 9 if seed % 8 else 90)), int(rng.integers(1, 5)), np.arange(34.0)
        speeds = [rng.choice([0.5, 1, 1, 2]) * gpus ** rng.choice([1, 1, 1.2, 0.8]) for _ in range(kinds)]
        kind = rng.integers(kinds, size=n)
        remaining = rng.choice([1.0, 2, 4, 8], n) if seed % 2 else rng.lognormal(2, 2, n)
        least = rng.choice([1, 1, 1, 2, 5], n).astype(np.int32)
        most = np.minimum(least + rng.integers(0, 20, n), 32).astype(np.int32)
        free = int(rng.integers(1, most.sum() + 3))
        got = afs_l_shares(remaining, np.concatenate(speeds), (kind * 34).astype(np.int32), least, most, free)
        want = naive.afs_l(remaining, [speeds[k] for k in kind], least, most, free)
        assert got.tolist() == want, f"seed {seed}"


def test_afs_l_and_optimus_equal_their_rules_on_views_of_many_jobs():
    """In every other view a second GPU may double the speed, so that jobs with and without shares compete."""
    for seed in range(30):
        view, gpus = naive.random_view(
            seed, doubling=seed % 2 == 0, min_one=seed % 4 > 0, jobs=250, most_gpus=1200
        )
        arrays = view.remaining, view.speeds, view.speed_at[0], view.min_gpus, view.max_gpus, gpus
        known = view.remaining, naive.curves_of(view), view.min_gpus, view.max_gpus, gpus
        assert afs_l_shares(*arrays).tolist() == naive.afs_l(*known), f"seed {seed}"
        assert optimus_shares(*arrays).tolist() == naive.optimus(*known), f"seed {seed}"


def folded(start, speeds, at, cap, gpus, order, tie, seed):
    """The shares after `hand_out_by_fold`, which must equal the plain fold."""
    got, challenger_wins = start.copy(), {"coin": 0.5, "first": 0.0, "last": 1.0}[tie]
    hand_out_by_fold(got, order, speeds, at, cap, gpus, challenger_wins, seed + 1)
    curves = [speeds[a : a + max(c, s) + 2] for a, c, s in zip(at, cap, start)]
    want = naive.hand_out_without_lengths(start, curves, cap, gpus, tie, order, naive.coins(seed + 1))
    assert got.tolist() == want, f"seed {seed}"
    return got


@pytest.mark.parametrize("tie", ["gain", "coin", "first", "last"])
@pytest.mark.parametrize("size", [{}, {"jobs": 700, "most_gpus": 2500}])
def test_afs_p_equals_a_left_fold_of_compare(tie, size):
    """From one GPU each. The fold starts where the gains alone no longer decide; see test_gap."""
    for seed in range(12) if size else VIEWS:
        view, gpus = naive.random_view(seed, min_one=True, **size)
        got = AfsP(AfsPOptions(tie=tie), rng=np.random.default_rng(seed)).shares(view, gpus, 0.0)
        start = (np.arange(len(view)) < gpus).astype(np.int32)
        left = hand_out_to_gap(start, view.speeds, view.speed_at[0], view.max_gpus, gpus - sum(start))
        toss = naive.coins(int(np.random.default_rng(seed).integers(1, 1 << 62)))
        want = naive.hand_out_without_lengths(
            start, naive.curves_of(view), view.max_gpus, left, tie, toss=toss
        )
        assert got.tolist() == want, f"seed {seed}"


def alike(seed, most_jobs):
    """Shares, curves, caps and GPUs of jobs with few curves: some have flat parts, some rise at every fourth GPU."""
    rng = np.random.default_rng(seed)
    width, kinds, n = 33, rng.integers(1, 17), rng.integers(1, most_jobs)
    speeds = []
    for _ in range(kinds):
        grown = np.cumsum(rng.integers(0, 4, width) * rng.choice([0.3, 1.0], width) / np.arange(1, width + 1))
        stepped = 1 / np.interp(np.arange(width), np.arange(0, width, 4), 1 / (1 + grown[::4]))
        speeds.append(np.concatenate([[0.0], 1 + grown if rng.random() < 0.5 else stepped]))
    at = (rng.integers(kinds, size=n) * (width + 1)).astype(np.int32)
    cap = rng.integers(1, rng.integers(2, width + 1), n).astype(np.int32)
    share = np.minimum(rng.integers(1, 3, n), cap).astype(np.int32)
    return share, np.concatenate(speeds), at, cap, int(rng.integers(1, 2 + (cap - share).sum()))


@pytest.mark.parametrize("tie", ["coin", "first", "last"])
@pytest.mark.parametrize(("most_jobs", "views"), [(8, range(400)), (200, range(25))])
def test_afs_p_among_jobs_of_few_curves_equals_a_left_fold_of_compare(tie, most_jobs, views):
    for seed in views:
        start, speeds, at, cap, gpus = alike(seed, most_jobs)
        order = np.random.default_rng(seed).permutation(len(at)).astype(np.int32)
        folded(start, speeds, at, cap, gpus, order, tie, seed)


def smooth(seed, most_jobs=300, most_gpus=1500):
    """The same for jobs whose speeds are known at every share: linear up to rounding, power laws, of two kinds, or
    flat at the end. Some adjacent jobs are at their cap."""
    rng = np.random.default_rng(seed)
    width, n = 65, int(rng.integers(most_jobs // 2, most_jobs))
    at_once = np.arange(width, dtype=float)
    powers = (np.ones(n), rng.uniform(0.5, 1.1, n), rng.integers(1, 3, n) / 2, np.ones(n))[seed % 4]
    paces = np.ones(n) if seed % 4 == 2 else rng.uniform(0.5, 2.0, n)
    ends = rng.integers(1, 6, n) if seed % 4 == 3 else np.full(n, width)
    speeds = [x * np.minimum(at_once, end) ** power for x, power, end in zip(paces, powers, ends)]
    cap = rng.integers(1, width, n).astype(np.int32)
    share = np.minimum(rng.integers(1, rng.integers(2, 20), n), cap).astype(np.int32)
    for begin in rng.integers(0, n, seed % 3):
        ended = slice(begin, begin + n // 3)
        share[ended] = cap[ended]
    gpus = min(int(rng.integers(1, 2 + (cap - share).sum())), most_gpus)
    return share, np.concatenate(speeds), (np.arange(n) * width).astype(np.int32), cap, gpus


@pytest.mark.parametrize("tie", ["coin", "first", "last"])
@pytest.mark.parametrize(("views", "size"), [(range(24), (300, 1500)), (range(24), (1500, 150))])
def test_afs_p_equals_a_left_fold_of_compare_where_the_candidate_changes_often(tie, views, size):
    for seed in views:
        start, speeds, at, cap, gpus = smooth(seed, *size)
        order = np.arange(len(at), dtype=np.int32)
        if seed % 2:
            np.random.default_rng(seed).shuffle(order)
        folded(start, speeds, at, cap, gpus, order, tie, seed)


def few_gain(seed):
    """The same for jobs of which some are linear up to rounding, and the others gain little, or nothing at the end."""
    rng = np.random.default_rng(seed)
    width, n = 65, int(rng.integers(2, 300))
    gain = np.where(rng.random(n) < rng.uniform(0.02, 0.4), 1.0, rng.uniform(0.0, rng.choice([0.05, 0.4]), n))
    ends = np.full(n, width) if seed % 2 else rng.integers(4, 30, n)
    grown = np.minimum(np.arange(width), ends[:, None]) - 1
    speeds = rng.uniform(0.5, 2.0, n)[:, None] * np.maximum(1 + gain[:, None] * grown, 0)
    cap = rng.integers(1, rng.choice([8, width]), n).astype(np.int32)
    share = np.minimum(rng.integers(1, 3, n), cap).astype(np.int32)
    gpus = min(int(rng.integers(1, 2 + (cap - share).sum())), 1000)
    return share, speeds.ravel(), (np.arange(n) * width).astype(np.int32), cap, gpus


@pytest.mark.parametrize("tie", ["coin", "first", "last"])
def test_afs_p_equals_a_left_fold_of_compare_where_few_jobs_gain_much(tie):
    for seed in range(60):
        start, speeds, at, cap, gpus = few_gain(seed)
        order = np.random.default_rng(seed).permutation(len(at)).astype(np.int32)
        folded(start, speeds, at, cap, gpus, order, tie, seed)


@pytest.mark.parametrize("tie", ["coin", "first", "last"])
def test_afs_p_equals_a_left_fold_of_compare_whatever_the_curves(tie):
    """Few jobs with speeds that rise, fall or stay the same, and shares that may exceed their cap."""
    for seed in range(150):
        rng = np.random.default_rng(seed)
        n = int(rng.integers(1, 10)) if seed % 3 else int(rng.integers(60, 70))
        speeds = np.abs(1 + np.cumsum(rng.choice([-0.1, 0.0, 0.2, 1.0], (n, 9)), axis=1)) + 0.1
        share, cap = rng.integers(1, 6, n).astype(np.int32), rng.integers(1, 8, n).astype(np.int32)
        gpus = int(rng.integers(1, 2 + np.maximum(cap - share, 0).sum()))
        at, order = np.arange(0, 9 * n, 9, dtype=np.int32), rng.permutation(n).astype(np.int32)
        folded(share, speeds.ravel(), at, cap, gpus, order, tie, seed)


def test_a_coin_of_afs_p_falls_on_either_side_about_as_often():
    """Two jobs with the same curve: every GPU beyond the first is a tie."""
    speeds, at = np.arange(5.0) ** 0.9, np.zeros(2, np.int32)
    won = 0
    for seed in range(1000):
        share = np.ones(2, np.int32)
        hand_out_by_fold(
            share, np.arange(2, dtype=np.int32), speeds, at, np.full(2, 3, np.int32), 1, 0.5, seed * 2**40 + 1
        )
        won += share[1] == 2
    assert 400 < won < 600


def test_afs_p_by_gain_gives_each_gpu_to_the_largest():
    for seed in range(48):
        start, speeds, at, cap, gpus = smooth(seed, 300, 600)
        order = np.random.default_rng(seed).permutation(len(at)).astype(np.int32)
        got = start.copy()
        hand_out_by_gain(got, order, speeds, at, cap, gpus)
        curves = [speeds[a : a + 65] for a in at]
        assert got.tolist() == naive.hand_out_without_lengths(start, curves, cap, gpus, "gain", order)


def test_afs_p_by_gain_ends_when_all_jobs_are_at_their_cap():
    share, speeds = np.ones(3, np.int32), np.array([0.0, 1.0, 2.0, 3.0])
    at, rows, cap = np.zeros(3, np.int32), np.arange(3, dtype=np.int32), np.array([2, 3, 1], np.int32)
    hand_out_by_gain(share, rows[:0], speeds, at, cap, 100)
    assert share.tolist() == [1, 1, 1]
    hand_out_by_gain(share, rows, speeds, at, cap, 100)
    assert share.tolist() == cap.tolist()


@pytest.mark.parametrize("challenger_wins", [0.5, 0.0, 1.0])
def test_afs_p_hands_out_a_gpu_even_if_it_slows_every_job_down(challenger_wins):
    """Speeds that fall so far that the gain overflows to -inf."""
    speeds, at = np.array([0.0, 1e10, 1e-300, 1e-300] * 2), np.array([0, 4], np.int32)
    rows, cap = np.arange(2, dtype=np.int32), np.full(2, 3, np.int32)
    share = np.ones(2, np.int32)
    hand_out_by_fold(share, rows, speeds, at, cap, 1, challenger_wins, 5)
    assert sorted(share.tolist()) == [1, 2]
    hand_out_by_gain(share, rows, speeds, at, cap, 1)
    assert sum(share) == 4


def test_optimus_equals_the_largest_gain_for_every_gpu():
    for seed in VIEWS:
        view, gpus = naive.random_view(seed)
        got = optimus_shares(
            view.remaining, view.speeds, view.speed_at[0], view.min_gpus, view.max_gpus, gpus
        )
        want = naive.optimus(view.remaining, naive.curves_of(view), view.min_gpus, view.max_gpus, gpus)
        assert got.tolist() == want, f"seed {seed}"


def test_max_min_equals_round_robin():
    for seed in VIEWS:
        view, gpus = naive.random_view(seed)
        order = np.random.default_rng(seed).permutation(len(view)).astype(np.int32)
        got = max_min_shares(order, view.min_gpus, view.max_gpus, gpus)
        assert got.tolist() == naive.max_min(order, view.min_gpus, view.max_gpus, gpus), f"seed {seed}"


@pytest.mark.parametrize("backfill", [True, False])
def test_filling_in_order_equals_a_plain_loop(backfill):
    for seed in VIEWS:
        view, gpus = naive.random_view(seed)
        order = np.random.default_rng(seed).permutation(len(view)).astype(np.int32)
        got = fill_in_order(order, view.requested_gpus, gpus, backfill)
        assert got.tolist() == naive.in_order(order, view.requested_gpus, gpus, backfill), f"seed {seed}"


@pytest.mark.parametrize("backfill", [True, False])
def test_fifo_keeps_running_jobs_and_starts_the_others_in_order(backfill):
    for seed in VIEWS:
        view, gpus = naive.random_view(seed)
        want, rng = view.requested_gpus, np.random.default_rng(seed)
        running, free = np.zeros(len(view), np.int32), gpus
        for j in rng.permutation(len(view))[: rng.integers(0, 10)]:
            if want[j] <= free:
                running[j] = want[j]
                free -= want[j]
        order = [*np.flatnonzero(running), *np.flatnonzero(running == 0)]
        got = fifo_shares(running, want, gpus, backfill)
        assert got.tolist() == naive.in_order(order, want, gpus, backfill), f"seed {seed}"


def test_grants_of_themis_equal_a_plain_loop():
    for seed in VIEWS:
        view, gpus = naive.random_view(seed)
        order = np.random.default_rng(seed).permutation(len(view)).astype(np.int32)
        got = grant_in_order(order, view.min_gpus, view.requested_gpus, gpus)
        assert got.tolist() == naive.grant_in_order(order, view.min_gpus, view.requested_gpus, gpus), seed


def test_remaining_times_equal_work_over_speed():
    for seed in VIEWS:
        view, _ = naive.random_view(seed)
        curves = naive.curves_of(view)
        got = times_at(view.remaining, view.speeds, view.speed_at[0], view.min_gpus)
        assert got.tolist() == [view.remaining[j] / curves[j][view.min_gpus[j]] for j in range(len(view))]


def test_the_gittins_index_equals_its_definition_tried_at_every_sample():
    for seed in range(100):
        rng = np.random.default_rng(seed)
        samples = rng.lognormal(5, 2, rng.integers(1, 25)).round(1) + 0.1
        samples = np.concatenate([samples, samples[:3]])  # some are equal
        policy = TiresiasG(TiresiasGOptions(distribution_gpu_s=tuple(samples)))
        for attained in (0.0, *samples):
            want = naive.gittins(samples.tolist(), attained)
            assert policy.index(np.array([attained]))[0] == pytest.approx(want, rel=1e-9), (seed, attained)
