"""Trading: the vectors, and what holds in every market: conservation, no loser, no use in overbidding."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.core.errors import ShoalError
from shoal.policies.gandiva_fair.trading import trade, type_order

SLOW, FAST = 0, 1


def market(shares, speed_ups):
    return np.array(shares, float), np.array([[1.0, s] for s in speed_ups])


def in_short(trades):
    return [
        (t.seller, t.buyer, round(t.price, 6), round(t.fast_gpus, 4), round(t.slow_gpus, 4)) for t in trades
    ]


def gains(before, after, speed):
    return (after * speed).sum(axis=1) / (before * speed).sum(axis=1) - 1


def test_three_users_with_speed_ups_4_6_and_8():
    shares, speed = market([[0.33, 0.33], [0.33, 0.33], [0.34, 0.34]], [4, 6, 8])
    after, trades = trade(shares, speed)
    assert in_short(trades) == [(0, 2, 6.0, 0.0567, 0.34), (0, 1, 4.0, 0.0825, 0.33)]
    np.testing.assert_allclose(after[:, SLOW], [1.0, 0.0, 0.0], atol=1e-9)
    np.testing.assert_allclose(after[:, FAST], [0.1908, 0.4125, 0.3967], atol=5e-5)
    np.testing.assert_allclose(gains(shares, after, speed), [0.069, 0.071, 0.037], atol=5e-4)


def test_two_users_trade_at_the_sellers_own_speed_up():
    shares, speed = market([[6, 1.5], [6, 1.5]], [1.2, 6])
    after, trades = trade(shares, speed)
    assert in_short(trades) == [(0, 1, 1.2, 1.5, 1.8)]
    np.testing.assert_allclose(after, [[7.8, 0], [4.2, 3]])
    np.testing.assert_allclose(gains(shares, after, speed), [0, 0.48], atol=1e-9)
    assert (after * speed).sum() / (shares * speed).sum() - 1 == pytest.approx(0.316, abs=5e-4)


def test_a_third_bidder_sets_the_price():
    shares, speed = market([[4, 1], [4, 1], [4, 1]], [1.2, 6, 2])
    after, trades = trade(shares, speed)
    assert in_short(trades) == [(0, 1, 2.0, 1.0, 2.0), (2, 1, 2.0, 1.0, 2.0)]
    np.testing.assert_allclose(after, [[6, 0], [0, 3], [6, 0]])
    np.testing.assert_allclose(gains(shares, after, speed), [0.154, 0.8, 0.0], atol=5e-4)
    assert (after * speed).sum() / (shares * speed).sum() - 1 == pytest.approx(0.415, abs=5e-4)


@st.composite
def markets(draw):
    users, types = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    numbers = st.floats(0.1, 10, allow_nan=False)
    shares = draw(
        st.lists(st.lists(st.floats(0, 30), min_size=types, max_size=types), min_size=users, max_size=users)
    )
    speed = draw(st.lists(st.lists(numbers, min_size=types, max_size=types), min_size=users, max_size=users))
    return np.array(shares), np.array(speed)


@settings(max_examples=500, deadline=None)
@given(markets())
def test_gpus_are_conserved_and_nobody_loses(drawn):
    shares, speed = drawn
    after, trades = trade(shares, speed)
    np.testing.assert_allclose(after.sum(axis=0), shares.sum(axis=0), atol=1e-6)
    assert (after >= 0).all()
    assert ((after * speed).sum(axis=1) >= (shares * speed).sum(axis=1) * (1 - 1e-9) - 1e-6).all()
    for t in trades:
        assert t.buyer_gain >= -1e-9
        assert t.seller_gain >= -1e-9
        assert t.slow_gpus == pytest.approx(t.price * t.fast_gpus)


@settings(max_examples=300, deadline=None)
@given(markets())
def test_trading_ends_only_when_no_pair_of_users_gains_any_more(drawn):
    shares, speed = drawn[0], drawn[1]
    if shares.shape[1] != 2:
        return
    slow, fast = type_order(speed)
    after, _ = trade(shares, speed)
    ratio = speed[:, fast] / speed[:, slow]
    for buyer in range(len(after)):
        for seller in range(len(after)):
            if ratio[buyer] > ratio[seller] * (1 + 1e-9):
                assert after[buyer, slow] <= 1e-8 or after[seller, fast] <= 1e-8


@settings(max_examples=300, deadline=None)
@given(markets(), st.floats(0.1, 20))
def test_no_misreport_by_the_highest_bidder_lowers_its_price_below_the_second_bid(drawn, lie):
    _, speed = drawn
    if speed.shape[1] < 2 or len(speed) < 2:
        return
    speed = np.column_stack([np.ones(len(speed)), speed[:, 0]])
    shares = np.ones_like(speed)
    top = int(np.argmax(speed[:, FAST]))
    second = np.delete(speed[:, FAST], top).max()
    reported = speed.copy()
    reported[top, FAST] = lie
    _, trades = trade(shares, reported, [SLOW, FAST])
    bought = [t for t in trades if t.buyer == top]
    if lie > second:
        assert all(t.price == pytest.approx(second) for t in bought)


def random_market(rng):
    n = int(rng.integers(2, 7))
    tickets = rng.integers(1, 5, n)
    shares = np.outer(tickets / tickets.sum(), [rng.integers(4, 65), rng.integers(2, 33)])
    return shares, np.column_stack([np.ones(n), rng.uniform(1, 8, n)])


def gain_of_lying(shares, speed, user, report):
    """What the user gains by a false report, in its own true measure."""
    honest, _ = trade(shares, speed, [SLOW, FAST])
    reported = speed.copy()
    reported[user, FAST] = report
    other, _ = trade(shares, reported, [SLOW, FAST])
    return (other[user] * speed[user]).sum() / (honest[user] * speed[user]).sum() - 1


def test_the_highest_bidder_gains_nothing_by_any_report_with_which_it_stays_highest():
    """Slowing down one's slow jobs to look faster, the gaming the slides speak of, changes nothing at all."""
    rng = np.random.default_rng(5)
    for _ in range(1000):
        shares, speed = random_market(rng)
        top = int(np.argmax(speed[:, FAST]))
        second = np.delete(speed[:, FAST], top).max()
        assert gain_of_lying(shares, speed, top, rng.uniform(second, 20)) == pytest.approx(0, abs=1e-9)


def test_a_false_report_costs_a_user_of_any_rank_on_average():
    """Not in every market: who knows all bids can gain by letting the second bidder run out first."""
    rng = np.random.default_rng(6)
    gains_of = [
        gain_of_lying(shares, speed, int(rng.integers(len(speed))), rng.uniform(0.5, 12))
        for shares, speed in (random_market(rng) for _ in range(1000))
    ]
    assert np.mean(gains_of) < -0.05


def test_who_has_no_measurement_of_a_type_takes_no_part_in_it():
    shares = np.array([[6, 1.5], [6, 1.5]])
    after, trades = trade(shares, np.array([[1.0, np.nan], [1.0, 6.0]]))
    assert not trades
    assert (after == shares).all()


def test_nobody_sells_for_more_slow_gpus_than_it_can_use():
    shares = np.array([[4.0, 2.0], [4.0, 2.0], [4.0, 2.0]])
    speed = np.array([[1, 1.2], [1, 6.0], [1, 3.0]])
    after, trades = trade(shares, speed, demand=np.array([7.0, 50, 50]))
    assert after[0].sum() == pytest.approx(7.0)
    first = next(t for t in trades if t.seller == 0)
    assert first.fast_gpus == pytest.approx(0.5)  # 1 room / (price 3 - 1)


def test_newer_is_not_always_faster():
    """GRU on P40 and P100: the older type is the faster one, and the order of types says so."""
    assert type_order(np.array([[1.0, 3.00, 2.58], [1.0, 4.34, 4.31]])).tolist() == [0, 2, 1]


def test_bad_markets_are_refused():
    with pytest.raises(ShoalError, match="give both for all"):
        trade(np.ones((2, 2)), np.ones((2, 3)))
    with pytest.raises(ShoalError, match="positive"):
        trade(np.ones((1, 2)), np.array([[1.0, 0.0]]))
