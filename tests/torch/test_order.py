"""Data order, batch rule, shares of a transfer and ballots: pure functions."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch")

from shoal.torch.order import BatchRule, permutation, share, step_parts, step_size
from shoal.torch.transfer import share_of, together
from shoal.torch.vote import MOST, ballot, count


@settings(deadline=None)
@given(st.integers(0, 200), st.integers(1, 16))
def test_shares_cover_a_batch_without_overlap_and_differ_by_one_at_most(size: int, workers: int):
    parts = [share(size, workers, r) for r in range(workers)]
    assert [i for a, b in parts for i in range(a, b)] == list(range(size))
    assert max(b - a for a, b in parts) - min(b - a for a, b in parts) <= 1


@settings(deadline=None)
@given(st.integers(0, 200), st.integers(1, 16), st.integers(2, 4))
def test_no_part_is_smaller_than_the_least_if_there_are_so_many_samples(size: int, workers: int, least: int):
    parts = [share(size, workers, r, least) for r in range(workers)]
    assert [i for a, b in parts for i in range(a, b)] == list(range(size))
    sizes = [b - a for a, b in parts if b > a]
    assert max(sizes, default=0) - min(sizes, default=0) <= 1
    assert min(sizes, default=least) >= min(least, size)
    assert len(sizes) == min(workers, size // least) or size < least


@settings(deadline=None)
@given(
    length=st.integers(1, 120),
    batch=st.integers(1, 40),
    accumulate=st.integers(1, 4),
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=10),
)
def test_whatever_the_number_of_workers_an_epoch_uses_each_sample_once_and_in_the_same_order(
    length: int, batch: int, accumulate: int, sizes: list[int]
):
    cursor, used, step = 0, [], 0
    while cursor < length:
        workers = sizes[step % len(sizes)]
        parts = [step_parts(cursor, length, batch, accumulate, workers, r) for r in range(workers)]
        for micro in zip(*parts):
            assert sum(p.weight for p in micro) == pytest.approx(1.0)
            used += [i for p in micro for i in range(p.begin, p.end)]
        assert all([p.last for p in mine] == [False] * (len(mine) - 1) + [True] for mine in parts)
        cursor += step_size(cursor, length, batch, accumulate)
        step += 1
    assert used == list(range(length))


def test_a_worker_without_a_part_has_no_weight():
    assert {p.weight for p in step_parts(0, 100, 16, 2, 3, None)} == {0.0}


def test_each_epoch_has_its_own_order_and_the_same_one_every_time():
    first = permutation(50, seed=1, epoch=0, shuffle=True).tolist()
    assert first == permutation(50, seed=1, epoch=0, shuffle=True).tolist()
    assert first != permutation(50, seed=1, epoch=1, shuffle=True).tolist()
    assert first != permutation(50, seed=2, epoch=0, shuffle=True).tolist()
    assert sorted(first) == permutation(50, seed=1, epoch=0, shuffle=False).tolist() == list(range(50))


def test_the_learning_rate_warms_up_to_the_rule_of_the_new_batch():
    rule = BatchRule(8, max_batch_size=20, lr_rule="linear", warmup_steps=10)
    assert [rule.batch(n) for n in (1, 2, 3, 4)] == [8, 16, 20, 20]
    assert "learning rate x2 by the linear rule" in (rule.resize(2, step=100) or "")
    assert [rule.current(s) for s in (100, 105, 110, 500)] == [1.0, 1.5, 2.0, 2.0]
    rule.resize(1, step=105)
    assert rule.current(105) == 1.5
    assert rule.current(115) == 1.0
    assert rule.resize(1, step=116) is None
    assert BatchRule(4, 64, "sqrt").factor(4) == 2.0
    assert BatchRule(4, 64, "none").factor(4) == 1.0
    assert BatchRule(4).batch(7) == 4


@settings(deadline=None)
@given(st.lists(st.integers(1, 9 << 20), max_size=12), st.integers(1, 4))
def test_all_sources_together_send_each_piece_once_and_about_as_much(sizes: list[int], sources: int):
    shares = [share_of(sizes, sources, index) for index in range(sources)]
    assert [piece for mine in shares for piece in mine] == list(range(len(sizes)))
    for mine in shares:
        assert abs(sum(sizes[p] for p in mine) - sum(sizes) / sources) <= max(sizes, default=0)


@settings(deadline=None)
@given(st.lists(st.integers(1, 50), max_size=12), st.integers(1, 60))
def test_small_pieces_are_sent_at_once_up_to_the_limit(sizes: list[int], limit_bytes: int):
    runs = together(sizes, limit_bytes)
    assert [i for run in runs for i in run] == list(range(len(sizes)))
    assert all(len(run) == 1 or sum(sizes[i] for i in run) <= limit_bytes for run in runs)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 10**6), st.booleans()), min_size=1, max_size=MOST))
def test_the_sum_of_all_ballots_tells_what_they_say(votes: list[tuple[int, bool]]):
    total = sum(ballot(flag, fits) for flag, fits in votes)
    assert total < 2**63
    assert count(total) == (sum(f > 0 for f, _ in votes), sum(g for _, g in votes), sum(f for f, _ in votes))
