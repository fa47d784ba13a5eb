"""The right number of GPUs by diminishing gains."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.knowledge.marginal_utility import concave_hull, right_share
from shoal.knowledge.unknown import Unknown


@pytest.mark.parametrize(
    ("speed", "options", "gpus"),
    [
        ([0, 1, 2, 3, 4], {}, 4),
        ([0, 1, 1.6, 1.9, 2.0], {}, 2),
        ([0, 1, 1.4, 1.5, 1.6], {}, 1),
        ([0, 1, 1.4, 1.5, 1.6], {"least": 0.1}, 4),
        ([0, 1, 1.4, 1.5, 1.6], {"min_gpus": 3}, 3),
        ([0, 1, 2, 3, 4], {"max_gpus": 2}, 2),
        ([0, 1, 1.0, 1.0, 3.4], {}, 4),
        ([0, 1, np.nan, np.nan, 3.4], {}, 4),
        ([0, 2, 1, 0.5], {}, 1),
    ],
)
def test_the_last_gpu_that_is_worth_its_place_is_the_right_number(speed, options, gpus):
    assert right_share(np.array(speed, dtype=float), **options).gpus == gpus


@given(st.lists(st.floats(0, 100), min_size=1, max_size=12))
def test_the_hull_is_concave_rising_and_above_every_known_point(speeds):
    speed = np.array([0.0, *speeds])
    hull = concave_hull(speed)
    assert (hull >= speed - 1e-9).all()
    assert (np.diff(hull) >= -1e-9).all()
    assert (np.diff(hull, 2) <= 1e-9).all()


@pytest.mark.parametrize("speed", [[0.0], [0.0, np.nan, 2.0], [0.0, 0.0, 1.0]])
def test_without_a_speed_on_one_gpu_there_is_no_measure(speed):
    assert isinstance(right_share(np.array(speed)), Unknown)
