"""Every kernel equals the rule as it is written, on thousands of random views."""

from __future__ import annotations

import numpy as np
import pytest

from shoal.policies.afs.afs_l import AfsL, AfsLOptions, afs_l_shares
from shoal.policies.afs.afs_p import afs_p_shares
from shoal.policies.afs.coins import BY_COIN, FIRST, LARGEST, LAST
from shoal.policies.afs.in_step import hand_out_in_step
from shoal.policies.afs.tournament_by_gain import hand_out_by_gain
from shoal.policies.afs.tournament_of_classes import hand_out_among_alike
from shoal.policies.fifo import fifo_shares
from shoal.policies.gittins import TiresiasG, TiresiasGOptions
from shoal.policies.max_min import max_min_shares
from shoal.policies.optimus import optimus_shares
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


def test_afs_l_compares_the_shortest_first_where_it_is_told_to():
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
    assert others, "the order made no difference on any view: the test shows nothing"


def test_afs_l_equals_a_left_fold_where_every_gpu_adds_as_much_as_the_first_or_more():
    """Jobs without a share compete with those that would double all along."""
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
    """Large enough for trees of several levels, for bars to be set anew and for grants in bulk; every other one
    has jobs whose next GPU doubles their speed, so that those with and without shares mix."""
    for seed in range(30):
        view, gpus = naive.random_view(
            seed, doubling=seed % 2 == 0, min_one=seed % 4 > 0, jobs=250, most_gpus=1200
        )
        arrays = view.remaining, view.speeds, view.speed_at[0], view.min_gpus, view.max_gpus, gpus
        known = view.remaining, naive.curves_of(view), view.min_gpus, view.max_gpus, gpus
        assert afs_l_shares(*arrays).tolist() == naive.afs_l(*known), f"seed {seed}"
        want, guess = naive.optimus(*known), 0.0
        for _ in range(2):  # from no guess, and from the last level
            got, guess = optimus_shares(*arrays, guess)
            assert got.tolist() == want, f"seed {seed}"


@pytest.mark.parametrize(("rule", "code"), [("random", BY_COIN), ("first", FIRST), ("last", LAST)])
@pytest.mark.parametrize("size", [{}, {"jobs": 700, "most_gpus": 2500}])
def test_afs_p_equals_a_left_fold_of_compare(rule, code, size):
    for seed in range(12) if size else VIEWS:
        view, gpus = naive.random_view(seed, min_one=True, **size)
        n = len(view)
        order, keep = np.random.default_rng(seed).permutation(n).astype(np.int32), np.zeros(n, bool)
        got = afs_p_shares(
            order, keep, view.gpus, view.speeds, view.speed_at[0], view.min_gpus, view.max_gpus, gpus,
            code, seed,
        )  # fmt: skip
        start = np.zeros(n, np.int32)
        start[order[:gpus]] = 1
        spare, until, curves = gpus - sum(start), start.copy(), (view.speeds, view.speed_at[0], view.max_gpus)
        left = hand_out_in_step(until, *curves, spare)
        left = hand_out_among_alike(until, order[:gpus], *curves, left, code, seed)
        want = naive.hand_out_without_lengths(
            start, naive.curves_of(view), view.max_gpus, spare, rule, seed, order, left
        )
        assert got.tolist() == want, f"seed {seed}"


def alike(seed, most_jobs):
    """Shares, curves, caps and GPUs of jobs of few curves: some flat in places, some fast only at every fourth GPU."""
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


@pytest.mark.parametrize(("rule", "code"), [("random", BY_COIN), ("first", FIRST), ("last", LAST)])
@pytest.mark.parametrize(("most_jobs", "views"), [(8, range(400)), (200, range(25))])
def test_afs_p_among_jobs_alike_equals_a_left_fold_of_compare(rule, code, most_jobs, views):
    ended_by_class = 0
    for seed in views:
        start, speeds, at, cap, gpus = alike(seed, most_jobs)
        curves = [speeds[a : a + 34] for a in at]
        order = np.random.default_rng(seed).permutation(len(at)).astype(np.int32)
        got = start.copy()
        left = hand_out_among_alike(got, order, speeds, at, cap, gpus, code, seed)
        ended_by_class += left == 0
        hand_out_by_gain(got, order, speeds, at, cap, left, code, seed)
        want = naive.hand_out_without_lengths(start, curves, cap, gpus, rule, seed, order, left)
        assert got.tolist() == want, f"seed {seed}"
    assert 0 < ended_by_class < len(views) or most_jobs < 64, "it is to meet views with too many classes, too"


def smooth(seed, most_jobs=300, most_gpus=1500):
    """Likewise of jobs whose speeds are known at every share: linear but for rounding, bent, of two kinds, or flat at
    last. Runs of jobs are at their cap."""
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


@pytest.mark.parametrize(("rule", "code"), [("random", BY_COIN), ("first", FIRST), ("last", LAST)])
# The 48th asks three deep who holds, so that a fold is walked.
@pytest.mark.parametrize(
    ("views", "size"), [(range(24), (300, 1500)), ([*range(24), 48], (1500, 150)), (range(6), (6000, 60))]
)
def test_afs_p_equals_a_left_fold_of_compare_where_the_holder_changes_all_the_time(rule, code, views, size):
    for seed in views:
        start, speeds, at, cap, gpus = smooth(seed, *size)
        curves = [speeds[a : a + 65] for a in at]
        order = np.arange(len(at), dtype=np.int32)
        if seed % 2:
            np.random.default_rng(seed).shuffle(order)
        got = start.copy()
        hand_out_by_gain(got, order, speeds, at, cap, gpus, code, seed)
        want = naive.hand_out_without_lengths(start, curves, cap, gpus, rule, seed, order, gpus)
        assert got.tolist() == want, f"seed {seed}"


def few_gain(seed):
    """Likewise of jobs of which some are linear, but for rounding, and the others gain little, or nothing at last."""
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


@pytest.mark.parametrize(("rule", "code"), [("random", BY_COIN), ("first", FIRST), ("last", LAST)])
def test_afs_p_equals_a_left_fold_of_compare_where_a_few_contend_alone(rule, code):
    alone = till_the_end = 0
    for seed in range(60):
        start, speeds, at, cap, gpus = few_gain(seed)
        curves = [speeds[a : a + 65] for a in at]
        order = np.random.default_rng(seed).permutation(len(at)).astype(np.int32)
        got = start.copy()
        hand_out_by_gain(got, order, speeds, at, cap, gpus, code, seed)
        places = gpus if rule == "random" else None  # without coins no matter who contends
        want = naive.hand_out_without_lengths(start, curves, cap, gpus, rule, seed, order, places)
        assert got.tolist() == want, f"seed {seed}"
        now, then = speeds[at + start], speeds[at + start + 1]
        gains = {
            j: ((then - now)[j] / now[j], (then - now)[j] / then[j]) for j in np.flatnonzero(start < cap)
        }
        few, _ = naive.contenders(gains, range(len(at)))
        alone += bool(few)
        till_the_end += bool(few) and not any(got[j] > start[j] for j in gains if j not in few)
    assert 0 < till_the_end < alone < 60, "it is to meet all of it"


@pytest.mark.parametrize(("rule", "code"), [("random", BY_COIN), ("first", FIRST), ("last", LAST)])
def test_afs_p_lets_all_play_when_those_who_contended_alone_gain_no_more_than_they(rule, code):
    """Two of six double, then gain nothing, as the others never do."""
    flat, doubles = [0.0, 1.0, 1.0, 1.0, 1.0], [0.0, 1.0, 2.0, 2.0, 2.0]
    curves = [doubles if j in (1, 3) else flat for j in range(6)]
    at, cap, order = (
        np.arange(0, 30, 5, dtype=np.int32),
        np.full(6, 4, np.int32),
        np.arange(6, dtype=np.int32),
    )
    for nonce in range(20):
        got = np.ones(6, np.int32)
        hand_out_by_gain(got, order, np.concatenate(curves), at, cap, 7, code, nonce)
        want = naive.hand_out_without_lengths([1] * 6, curves, cap, 7, rule, nonce, order, 7)
        assert got.tolist() == want
        assert min(got[1], got[3]) >= 2


@pytest.mark.parametrize(("rule", "code"), [("random", BY_COIN), ("first", FIRST), ("last", LAST)])
def test_afs_p_equals_a_left_fold_of_compare_whatever_the_curves(rule, code):
    """Few jobs, with speeds that rise, fall or stand still, and shares that may be above their cap."""
    for seed in range(150):
        rng = np.random.default_rng(seed)
        n = int(rng.integers(1, 10)) if seed % 3 else int(rng.integers(60, 70))
        speeds = np.abs(1 + np.cumsum(rng.choice([-0.1, 0.0, 0.2, 1.0], (n, 9)), axis=1)) + 0.1
        share, cap = rng.integers(1, 6, n).astype(np.int32), rng.integers(1, 8, n).astype(np.int32)
        gpus = int(rng.integers(1, 2 + np.maximum(cap - share, 0).sum()))
        at, order = np.arange(0, 9 * n, 9, dtype=np.int32), rng.permutation(n).astype(np.int32)
        got = share.copy()
        hand_out_by_gain(got, order, speeds.ravel(), at, cap, gpus, code, seed)
        want = naive.hand_out_without_lengths(share, speeds, cap, gpus, rule, seed, order, gpus)
        assert got.tolist() == want, f"seed {seed}"


def test_afs_p_by_gain_gives_each_gpu_to_the_largest():
    for seed in range(48):
        start, speeds, at, cap, gpus = smooth(seed, 300, 600)
        order = np.random.default_rng(seed).permutation(len(at)).astype(np.int32)
        got = start.copy()
        hand_out_by_gain(got, order, speeds, at, cap, gpus, LARGEST, 0)
        curves = [speeds[a : a + 65] for a in at]
        assert got.tolist() == naive.hand_out_without_lengths(start, curves, cap, gpus, "gain", 0, order)


def test_afs_p_by_gain_ends_where_all_have_what_they_can_use():
    share, speeds = np.ones(3, np.int32), np.array([0.0, 1.0, 2.0, 3.0])
    at, rows, cap = np.zeros(3, np.int32), np.arange(3, dtype=np.int32), np.array([2, 3, 1], np.int32)
    hand_out_by_gain(share, rows[:0], speeds, at, cap, 100, LARGEST, 0)
    assert share.tolist() == [1, 1, 1]
    hand_out_by_gain(share, rows, speeds, at, cap, 100, LARGEST, 0)
    assert share.tolist() == cap.tolist()


@pytest.mark.parametrize("code", [BY_COIN, FIRST, LAST])
def test_afs_p_ends_where_a_gpu_more_would_be_the_end_of_a_job(code):
    """Speeds that fall so far that the gain is no number: nobody gains anything, and somebody gets it."""
    speeds, share = np.array([0.0, 1e10, 1e-300, 1e-300] * 2), np.ones(2, np.int32)
    at, rows = np.array([0, 4], np.int32), np.arange(2, dtype=np.int32)
    hand_out_by_gain(share, rows, speeds, at, np.full(2, 3, np.int32), 1, code, 5)
    assert sorted(share.tolist()) == [1, 2]


def test_optimus_equals_the_largest_gain_for_every_gpu_whatever_the_guess():
    for seed in VIEWS:
        view, gpus = naive.random_view(seed)
        guess = -float(np.random.default_rng(seed).lognormal(0, 5)) if seed % 4 else 0.0
        got, _ = optimus_shares(
            view.remaining, view.speeds, view.speed_at[0], view.min_gpus, view.max_gpus, gpus, guess
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
