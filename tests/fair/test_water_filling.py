"""Weighted water-filling: the worked example, what defines it, and the kernel against the plain form."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.core.errors import ShoalError
from shoal.core.water_filling import water_fill, water_fill_into

users = st.lists(
    st.tuples(st.integers(1, 9).map(Fraction), st.integers(0, 40).map(Fraction)), min_size=1, max_size=8
)


def test_what_a_small_user_cannot_use_goes_to_the_others():
    third = Fraction(1)
    assert water_fill([third] * 3, [Fraction(4), Fraction(4), Fraction(2)], Fraction(8)) == [3, 3, 2]


def test_users_share_by_tickets_when_nobody_is_capped():
    assert water_fill([Fraction(3), Fraction(1)], [Fraction(99), Fraction(99)], Fraction(8)) == [6, 2]


@given(users, st.integers(0, 60).map(Fraction))
def test_nobody_below_demand_has_less_per_ticket_than_anyone_else(claims, supply):
    weights, demand = zip(*claims)
    share = water_fill(weights, demand, supply)
    assert sum(share) == min(supply, sum(demand))
    assert all(0 <= s <= d for s, d in zip(share, demand))
    for i, s in enumerate(share):
        if s < demand[i]:
            assert all(s / weights[i] >= other / weights[j] for j, other in enumerate(share))


@given(users, st.integers(0, 60).map(Fraction))
def test_the_kernel_equals_the_plain_form(claims, supply):
    weights, demand = (np.array([float(x) for x in column]) for column in zip(*claims))
    out = np.full(len(weights), np.nan)
    water_fill_into(weights, demand, float(supply), out)
    exact = water_fill(*zip(*claims), supply)
    np.testing.assert_allclose(out, [float(x) for x in exact], atol=1e-9)


def test_who_has_no_weight_gets_what_is_left_over():
    out = np.empty(3)
    water_fill_into(np.array([1.0, 0.0, 0.0]), np.array([2.0, 9.0, 1.0]), 6.0, out)
    assert out.tolist() == [2.0, 3.0, 1.0]


@pytest.mark.parametrize("tickets", [0.0, -1.0])
def test_zero_or_negative_tickets_are_refused_with_a_remedy(tickets):
    with pytest.raises(ShoalError, match="positive number of tickets"):
        water_fill([1.0, tickets], [1.0, 1.0], 4.0)
