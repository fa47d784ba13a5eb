"""The phases of a finished job: before, after and around its use of the GPU."""

import numpy as np
import pytest

from shoal.knowledge.phases import Phases, phases_of
from shoal.knowledge.unknown import Unknown

TIMES = np.arange(0.0, 100.0, 5.0)


def test_pre_and_post_are_outside_the_first_and_last_busy_sample():
    util = np.where((TIMES >= 20) & (TIMES <= 80), 90.0, 3.0)
    assert phases_of(TIMES, util, 0.0, 100.0) == Phases(20.0, 20.0, 100.0)


def test_exactly_15_percent_is_not_busy():
    util = np.where(TIMES == 50, 16.0, 15.0)
    answer = phases_of(TIMES, util, 0.0, 100.0)
    assert answer == Phases(25.0, 25.0, 100.0), "50 + 50 is the whole run, so both are halved"


@pytest.mark.parametrize(
    ("util", "end_s", "why"),
    [
        (np.zeros(20), 100.0, "never busy"),
        (np.ones(20) * 90, 0.0, "ended"),
        (np.ones(3), 100.0, "samples differ"),
    ],
)
def test_what_cannot_be_told_is_unknown(util, end_s, why):
    answer = phases_of(TIMES, util, 0.0, end_s)
    assert isinstance(answer, Unknown)
    assert why in answer.why
