"""Numbers that cannot be: refused in a sentence or answered with why, never an exception of another kind."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from shoal.core.cluster import Cluster, Node
from shoal.core.errors import ShoalError
from shoal.placement import parameter_assignment
from shoal.placement.best_fit import BestFit, best_fit
from shoal.placement.fragmentation import fragmentation
from shoal.placement.grouping_ga import Search, place_batch
from shoal.placement.liquid_score import Containers
from shoal.placement.measured_profiles import iteration_times
from shoal.placement.moving_placer import MoveRule, find_moves, gain_s
from shoal.placement.placer import Unplaced
from shoal.placement.preschedule import PreRule, Running, find_ending_gpu, may_enter
from shoal.placement.ps_speed import TRAFFIC, slowdown, step_time_s
from shoal.placement.sharing import GpuUse, SharingRule, find_shared_gpu
from shoal.placement.task_placement import place

pytestmark = pytest.mark.filterwarnings("error")
CLUSTER = Cluster((Node("a", 2), Node("b", 2), Node("c", 4)))
NONE = np.zeros(3, np.int32)
NOT_FINITE = [math.nan, math.inf, -math.inf]
NOT_COUNTS = [*NOT_FINITE, -1, 1.5, 10**30]
SPREAD = {1: ((0, 1), (1, 1))}


def half_as_fast_on_two(job, gpu_type, placement):
    return 2.0 / len(placement)


@pytest.mark.parametrize("number", NOT_COUNTS)
@pytest.mark.parametrize(
    "refused",
    [
        lambda n: Containers(n, 1),
        lambda n: Containers(1, n),
        lambda n: Search(population=n),
        lambda n: Search(stagnation=n),
        lambda n: Search(tournament=n),
        lambda n: Search(max_plans=n),
        lambda n: MoveRule(max_moves=n),
        lambda n: fragmentation(NONE + 3, n),
        lambda n: parameter_assignment.balanced([4, 3], n),
        lambda n: parameter_assignment.mxnet([n, 3], 2),
        lambda n: parameter_assignment.round_robin([n, 3], 2),
        lambda n: step_time_s(TRAFFIC["wlm"], [(n, 1)]),
        lambda n: slowdown("wlm", ((0, n), (1, 1)), 1),
        lambda n: slowdown("wlm", SPREAD[1], n),
        lambda n: place(np.full((2, 1), 9.0), [n], [1], [[1.0]], [[1.0]]),
        lambda n: place(np.full((2, 1), 9.0), [1], [n], [[1.0]], [[1.0]]),
        lambda n: place(np.full((2, 1), 9.0), [1], [1], [[1.0]], [[1.0]], order_by=n),
    ],
)
def test_what_is_counted_must_be_a_whole_number_of_a_sensible_size(refused, number):
    with pytest.raises(ShoalError, match=r"whole number|at least one") as told:
        refused(number)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize("number", [*NOT_FINITE, -1.0])
@pytest.mark.parametrize(
    "refused",
    [
        lambda x: Containers(1, 2, x),
        lambda x: best_fit(CLUSTER, Containers(1, 2), NONE, lam=x),
        lambda x: Search(lam=x),
        lambda x: Search(crossover=x),
        lambda x: Search(mutation=x),
        lambda x: MoveRule(move_s=x),
        lambda x: MoveRule(horizon_s=x),
        lambda x: SharingRule(busy_from=x),
        lambda x: SharingRule(max_utilisation=x),
        lambda x: PreRule(extra_s=x),
        lambda x: iteration_times("m", [("1", x, 1.0)], 8),
        lambda x: iteration_times("m", [("1", 8.0, x)], 8),
        lambda x: iteration_times("m", [("1", 8.0, 1.0)], x),
        lambda x: dataclasses.replace(TRAFFIC["wlm"], inter_mb_s=x),
        lambda x: place(np.full((2, 1), 9.0), [1], [1], [[x]], [[1.0]]),
    ],
)
def test_what_is_measured_must_be_a_finite_number_and_not_below_nothing(refused, number):
    with pytest.raises(ShoalError) as told:
        refused(number)
    assert len(str(told.value)) > 20


@pytest.mark.parametrize(
    "used",
    [
        np.array([-1, 0, 0]),
        np.array([3, 0, 0]),
        np.array([math.nan, 0, 0]),
        np.array([0.5, 0, 0]),
        np.zeros(2, np.int32),
        np.zeros(0, np.int32),
    ],
)
def test_gpus_in_use_that_no_node_can_have(used):
    with pytest.raises(ShoalError, match="GPUs in use must be"):
        best_fit(CLUSTER, Containers(1, 1), used)
    with pytest.raises(ShoalError, match="GPUs in use must be"):
        place_batch(CLUSTER, [Containers(1, 1)], used, np.random.default_rng(0))


def test_what_fits_nowhere_is_told_so():
    for variant in BestFit:
        found = best_fit(CLUSTER, Containers(0, 9), NONE, variant=variant)
        assert found == Unplaced("it needs 9 GPUs and 8 are free")
    batch = place_batch(CLUSTER, [Containers(0, 9)], NONE, np.random.default_rng(0))
    assert batch.spots == (Unplaced("the batch does not fit on 8 free GPUs; it waits for the next"),)
    assert place_batch(CLUSTER, [], NONE, np.random.default_rng(0)).spots == ()
    nowhere = place(np.zeros((0, 1)), [1], [1], [[1.0]], [[1.0]])
    assert nowhere.placed_workers.tolist() == [0], "no nodes at all"
    with pytest.raises(ShoalError, match="one row per node"):
        place(np.ones(2), [1], [1], [[1.0]], [[1.0]])
    with pytest.raises(ShoalError, match="100000000 in all at most"):
        place(np.ones((2, 1)), [10**8], [1], [[1.0]], [[1.0]])


@pytest.mark.parametrize("number", [*NOT_FINITE, -1.0, 0.0, -1e300])
def test_no_one_moves_for_a_speed_or_a_rest_that_cannot_be(number):
    assert not gain_s(number, 2.0, 100.0, MoveRule()) > 0
    assert not gain_s(1.0, number, 100.0, MoveRule()) > 0
    if (
        not math.isnan(number) and number < math.inf
    ):  # a rest that is not known, or without end, counts to the horizon
        assert not gain_s(1.0, 2.0, number, MoveRule()) > 0
        assert (
            find_moves(CLUSTER, CLUSTER.gpus_of_node, SPREAD, {1: number}, half_as_fast_on_two, MoveRule())
            == []
        )
    assert (
        find_moves(CLUSTER, CLUSTER.gpus_of_node, SPREAD, {1: 1e6}, lambda j, t, p: number, MoveRule()) == []
    )


@pytest.mark.parametrize("number", [*NOT_FINITE, -1.0, -1e300])
def test_no_gpu_is_shared_nor_used_early_by_numbers_that_cannot_be(number):
    gpu, ends = GpuUse(16_000.0, 1_000.0, (0.2,)), Running(90.0, 100.0, 5.0)
    assert find_shared_gpu([gpu], 100.0, 0.1) == 0
    assert isinstance(find_shared_gpu([gpu], number, 0.1), Unplaced)
    assert isinstance(find_shared_gpu([gpu], 100.0, number), Unplaced)
    assert isinstance(find_shared_gpu([dataclasses.replace(gpu, utilisations=(number,))], 1.0, 0.1), Unplaced)
    assert isinstance(find_shared_gpu([dataclasses.replace(gpu, allocated_mb=number)], 1.0, 0.1), Unplaced)
    assert find_ending_gpu([ends], 5.0) == 0
    assert isinstance(find_ending_gpu([ends], number), Unplaced)
    for name in ("elapsed_s", "total_s", "post_s"):
        assert isinstance(find_ending_gpu([dataclasses.replace(ends, **{name: number})], 5.0), Unplaced)
    if not number < 0:
        assert not may_enter([number, number], 1_000.0, 1_000.0, 500.0)
    assert isinstance(find_shared_gpu([], 1.0, 0.1), Unplaced)
    assert isinstance(find_ending_gpu([], 5.0), Unplaced)
