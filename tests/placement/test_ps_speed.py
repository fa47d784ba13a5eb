"""Speed by placement: the DL2 model by hand, and Liquid's table."""

from __future__ import annotations

import pytest

from shoal.core.errors import ShoalError
from shoal.placement.ps_speed import (
    LAYOUT_TIME_S,
    LAYOUTS,
    TRAFFIC,
    Traffic,
    layout,
    layout_time_s,
    slowdown,
    step_time_s,
    tasks_by_node,
)

#: 1 s of computing, 100 MB, 10 MB/s between nodes and 100 MB/s inside.
PLAIN = Traffic(1.0, 100.0, 10.0, 100.0, 1)


@pytest.mark.parametrize(
    ("tasks", "seconds"),
    [
        ([(1, 1)], 1 + 2 * 100 / 100),  # all local
        ([(1, 2)], 1 + 2 * 100 * 2 / 100),  # two workers share the inside
        ([(1, 0), (0, 1)], 1 + 2 * 100 / 10),  # one stream between nodes
        ([(1, 0), (0, 2)], 1 + 2 * 100 * 2 / 10),  # the server sends to two workers elsewhere
        ([(1, 1), (0, 1)], 1 + 2 * 100 * 1 / 10),  # it sends to one
        ([(1, 1), (1, 1)], 1 + 2 * 50 * 1 / 10),  # half the parameters, one server elsewhere
        ([(2, 0), (0, 1)], 1 + 2 * 50 * 2 / 10),  # the worker receives from two
        ([(1, 1), (0, 0)], 3.0),  # a node without tasks does not count
    ],
)
def test_a_step_takes_as_long_as_its_slowest_exchange(tasks, seconds):
    assert step_time_s(PLAIN, tasks) == pytest.approx(seconds)


@pytest.mark.parametrize("model", sorted(TRAFFIC))
def test_together_is_never_slower_than_dealt_over_two_and_that_never_than_apart(model):
    traffic = TRAFFIC[model]
    dealt = step_time_s(traffic, [(2, 2), (2, 2)])
    apart = step_time_s(traffic, [(4, 0), (0, 4)])
    assert dealt <= apart
    if traffic.intra_mb_s > 2 * traffic.inter_mb_s:
        assert step_time_s(traffic, [(4, 4)]) <= dealt


def test_a_job_without_servers_has_no_speed_here():
    with pytest.raises(ShoalError, match="at least one server and one worker"):
        step_time_s(PLAIN, [(0, 2)])


@pytest.mark.parametrize(
    ("ps", "workers", "name"),
    [((3,), (3, 3), "pww"), ((3,), (1, 2), "p:w:w"), ((3,), (3, 1), "pw:w"), ((3,), (1, 1), "p:ww")],
)
def test_the_layouts_are_told_apart(ps, workers, name):
    assert layout(ps, workers) == name
    assert layout_time_s("vgg16", ps, workers) == LAYOUT_TIME_S["vgg16"][name]


def test_the_ratios_to_pww_are_those_the_paper_plots():
    ratios = {
        model: [round(times[name] / times["pww"], 2) for name in LAYOUTS[1:]]
        for model, times in LAYOUT_TIME_S.items()
    }
    assert ratios == {
        "vgg16": [1.59, 1.50, 2.33],
        "resnet50": [1.03, 1.00, 1.26],
        "inception3": [1.00, 1.02, 1.07],
    }


def test_what_was_not_measured_is_not_guessed():
    with pytest.raises(ShoalError, match="step_time_s"):
        layout((0,), (1, 2, 3))
    with pytest.raises(ShoalError, match="did you mean 'vgg16'"):
        layout_time_s("vgg", (0,), (0, 0))


@pytest.mark.parametrize(
    ("placement", "servers", "apart", "tasks"),
    [
        (((0, 2),), 1, False, [(1, 2)]),
        (((0, 1), (3, 1)), 1, False, [(1, 1), (0, 1)]),
        (((0, 1), (3, 4)), 3, False, [(2, 4), (1, 1)]),  # where most workers are, first
        (((0, 2),), 1, True, [(1, 0), (0, 2)]),
        (((0, 1), (3, 1)), 2, True, [(2, 0), (0, 1), (0, 1)]),
    ],
)
def test_servers_are_dealt_to_the_workers_nodes_or_have_one_of_their_own(placement, servers, apart, tasks):
    assert tasks_by_node(placement, servers, apart=apart) == tasks


@pytest.mark.parametrize(
    ("placement", "apart", "name"),
    [
        (((2, 2),), False, "pww"),
        (((2, 1), (5, 1)), False, "pw:w"),
        (((2, 2),), True, "p:ww"),
        (((2, 1), (5, 1)), True, "p:w:w"),
    ],
)
@pytest.mark.parametrize("model", sorted(LAYOUT_TIME_S))
def test_one_server_and_two_workers_are_as_slow_as_measured(model, placement, apart, name):
    times = LAYOUT_TIME_S[model]
    assert slowdown(model, placement, 1, apart=apart) == pytest.approx(times[name] / times["pww"])


def test_other_jobs_are_as_slow_as_the_model_says_and_unknown_ones_as_on_one_node():
    spread = ((0, 2), (1, 2))
    traffic = TRAFFIC["resnet-50"]
    expected = step_time_s(traffic, [(1, 2), (1, 2)]) / step_time_s(traffic, [(2, 4)])
    assert slowdown("resnet50", spread, 2) == slowdown("ResNet-50", spread, 2) == pytest.approx(expected)
    assert expected > 1.1
    assert slowdown("resnet50", ((0, 4),), 2) == 1.0
    assert slowdown("my-net", spread, 2) == 1.0
    assert all(slowdown(model, spread, 2) >= 1.0 for model in TRAFFIC)
