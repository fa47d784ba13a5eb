"""Liquid's two ways to use a GPU that is not vacant, as tables of cases."""

from __future__ import annotations

import math

import pytest

from shoal.placement.placer import Unplaced
from shoal.placement.preschedule import PreRule, Running, find_ending_gpu, may_enter, may_launch_early
from shoal.placement.sharing import GpuUse, SharingRule, find_shared_gpu

VACANT = GpuUse(16_000)
LIGHT = GpuUse(16_000, 4_000, (0.5,))
HEAVY = GpuUse(16_000, 4_000, (0.95,))
FULL = GpuUse(16_000, 12_000, (0.2,))
PAIR = GpuUse(16_000, 6_000, (0.4, 0.4))


@pytest.mark.parametrize(
    ("gpus", "memory", "utilisation", "expected"),
    [
        ([HEAVY, LIGHT], 8_000, 0.5, 1),  # 0.95 + 0.5 is above 1.3
        ([HEAVY, LIGHT], 8_000, 0.3, 0),  # the first that qualifies
        ([FULL, LIGHT], 4_000, 0.1, 1),  # memory must be more than what is needed, not equal
        ([PAIR], 4_000, 0.4, 0),
        ([PAIR], 4_000, 0.5, None),  # 1.3 is not below 1.3
        ([LIGHT, LIGHT, LIGHT, VACANT], 100, 0.1, 0),
        ([LIGHT, VACANT], 100, 0.1, None),  # half busy: sharing begins at 75 %
        ([], 100, 0.1, None),
    ],
)
def test_a_gpu_is_shared_where_memory_and_utilisation_allow(gpus, memory, utilisation, expected):
    got = find_shared_gpu(gpus, memory, utilisation)
    assert isinstance(got, Unplaced) if expected is None else got == expected


@pytest.mark.parametrize(
    ("kw", "because"),
    [
        ({"memory_mb": math.nan, "utilisation": 0.1}, "not known"),
        ({"memory_mb": 10, "utilisation": math.inf}, "not known"),
        ({"memory_mb": 10, "utilisation": 0.1, "gpus_wanted": 2}, "one GPU"),
        ({"memory_mb": 10, "utilisation": 0.1, "rule": SharingRule(busy_from=1.75)}, "sharing begins"),
        ({"memory_mb": 90_000, "utilisation": 0.1}, "to spare"),
    ],
)
def test_a_job_that_may_not_share_is_told_why(kw, because):
    got = find_shared_gpu([LIGHT], **kw)
    assert isinstance(got, Unplaced)
    assert because in got.because


@pytest.mark.parametrize(
    ("elapsed", "pre", "launch"),
    [(65, 20, False), (65.1, 20, True), (85, 0, False), (85.1, 0, True), (0, 100, True)],
)
def test_the_next_job_is_launched_when_elapsed_is_above_total_less_post_pre_and_15_s(elapsed, pre, launch):
    # total 110, post 10: the threshold is 110 - 10 - pre - 15.
    assert may_launch_early(Running(elapsed, 110, 10), pre) is launch


def test_unknown_times_and_gpus_with_two_jobs_never_qualify():
    assert not may_launch_early(Running(100, math.nan, 0), 10)
    assert not may_launch_early(Running(100, 100, 0), math.nan)
    assert not may_launch_early(Running(100, 100, 0, alone=False), 10)


def test_the_first_gpu_that_ends_soon_is_taken_if_none_is_vacant():
    ending, running = Running(95, 100, 5), Running(1, 100, 5)
    assert find_ending_gpu([running, ending, ending], 10) == 1
    assert isinstance(find_ending_gpu([ending, None], 10), Unplaced)
    assert isinstance(find_ending_gpu([running], 10), Unplaced)
    assert isinstance(find_ending_gpu([ending], 10, gpus_wanted=2), Unplaced)
    assert isinstance(find_ending_gpu([ending], 10, rule=PreRule(busy_from=1.75)), Unplaced)


@pytest.mark.parametrize(
    ("reports", "free", "used", "enters"),
    [
        ([0.9, 0.05, 0.05], 9_000, 7_000, True),
        ([0.05], 9_000, 7_000, False),  # one report is not two
        ([0.05, 0.2, 0.05], 9_000, 7_000, False),
        ([0.05, 0.05], 7_000, 9_000, False),  # not enough memory
        ([0.05, 0.05], 7_000, 50, True),  # all but empty: what is free is all there is
    ],
)
def test_a_waiting_job_enters_after_two_idle_reports_and_with_memory(reports, free, used, enters):
    assert may_enter(reports, free, used, need_mb=8_000) is enters
