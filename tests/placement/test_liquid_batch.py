"""Jobs that start together, placed together: never worse than one by one, often better, always the same."""

from __future__ import annotations

import numpy as np
import pytest

from shoal.core.cluster import Cluster, Node
from shoal.placement import liquid_batch
from shoal.placement.grouping_ga import Batch, Search
from shoal.placement.liquid_batch import LiquidBatchPlacer
from shoal.placement.liquid_placer import LiquidPlacer
from shoal.placement.liquid_score import Containers
from shoal.placement.registry import Setting, make_placer

from .cases import Bench, size

NODES = Cluster.of(4, 4, rack_nodes=2)


def batch_of(seed: int) -> tuple[Cluster, np.ndarray, dict[int, int]]:
    """A small cluster, the GPUs in use on each node, and jobs that fit on what is free."""
    rng = np.random.default_rng(seed)
    cluster = Cluster.of(int(rng.integers(3, 9)), 4, rack_nodes=int(rng.integers(1, 4)))
    used = rng.integers(0, 4, len(cluster.nodes))
    left, jobs = int((4 - used).sum()), {}
    for job_id in range(1, 9):
        share = int(rng.choice([1, 2, 3, 4, 6]))
        if share <= left:
            jobs[job_id], left = share, left - share
    return cluster, used, jobs


def placed(placer, cluster: Cluster, used: np.ndarray, jobs: dict[int, int]) -> dict:
    """Where the jobs go that all start at one decision, while job 0 has what is in use."""
    b = Bench(cluster, placer)
    b.add(0)
    b.place({0: int(used.sum())}, given={0: tuple((n, int(u)) for n, u in enumerate(used) if u)})
    for job_id in jobs:
        b.add(job_id)
    b.place(jobs)
    assert (b.used() <= cluster.gpus_of_node).all()
    assert {j: size(b.current[j]) for j in jobs} == jobs
    return {j: b.current[j] for j in jobs}


def value(cluster: Cluster, used: np.ndarray, where: dict) -> float:
    """What Liquid's batch mode minimises: the sum of the jobs' scores, and the nodes used."""
    batch = Batch.of(cluster, [Containers(0, size(p)) for p in where.values()], used)
    return batch.value(
        np.array([n for p in where.values() for n, g in p for _ in range(g)], np.int32), Search()
    )


@pytest.mark.parametrize("max_plans", [0, 100, 2000])
def test_a_batch_is_never_placed_worse_than_one_by_one_and_mostly_better_when_searched(max_plans):
    better = 0
    for seed in range(40):
        case = batch_of(seed)
        ours = placed(LiquidBatchPlacer(search=Search(max_plans=max_plans)), *case)
        theirs = placed(LiquidPlacer(), *case)
        gain = value(*case[:2], theirs) - value(*case[:2], ours)
        assert gain >= -1e-9
        better += gain > 1e-9
        if max_plans == 0:
            assert ours == theirs
    assert better >= {0: 0, 100: 20, 2000: 30}[max_plans]


def test_two_jobs_of_three_get_a_node_each_where_best_fit_tears_the_second_apart():
    jobs, nothing = {1: 3, 2: 3}, np.zeros(4, int)
    assert placed(LiquidPlacer(), NODES, nothing, jobs) == {1: ((0, 3),), 2: ((0, 1), (1, 2))}
    together = placed(LiquidBatchPlacer(), NODES, nothing, jobs)
    assert all(len(where) == 1 for where in together.values())


def test_one_new_job_alone_is_best_fit():
    a, b = Bench(NODES, LiquidBatchPlacer()), Bench(NODES, LiquidPlacer())
    for job_id, share in enumerate([3, 3, 2, 5, 1, 2]):
        a.add(job_id)
        b.add(job_id)
        assert a.place({job_id: share}) == b.place({job_id: share})


def test_who_runs_stays_and_who_grows_keeps_its_workers_while_others_start():
    b = Bench(NODES, LiquidBatchPlacer())
    for job_id in range(4):
        b.add(job_id)
    b.place({0: 2}, given={0: ((1, 2),)})
    b.place({1: 2}, given={1: ((3, 2),)})
    found = b.place({1: 3, 2: 3, 3: 3}).placements
    assert 0 not in found
    assert size(found[1]) == 3
    assert dict(found[1])[3] >= 2
    assert len(found[2]) == len(found[3]) == 1


def test_the_same_seed_gives_the_same_places_whatever_was_placed_before():
    seeds_differ = False
    for seed in range(10):
        case = batch_of(seed)
        used_before = LiquidBatchPlacer(seed=3)
        placed(used_before, *batch_of(seed + 1))
        assert placed(used_before, *case) == placed(LiquidBatchPlacer(seed=3), *case)
        seeds_differ |= placed(LiquidBatchPlacer(seed=4), *case) != placed(LiquidBatchPlacer(seed=3), *case)
    assert seeds_differ


def test_the_jobs_of_each_gpu_type_are_a_batch_of_their_own():
    cluster = Cluster(tuple(Node(f"n{i}", 4, "ab"[i % 2]) for i in range(6)))
    b = Bench(cluster, LiquidBatchPlacer())
    for job_id in range(6):
        b.add(job_id)
    kind = {job_id: job_id % 2 for job_id in range(6)}
    found = b.place(dict.fromkeys(range(6), 3), types=kind).placements
    assert all(cluster.type_of_node[n] == kind[j] for j, where in found.items() for n, _ in where)
    assert all(len(where) == 1 for where in found.values())


def test_large_batches_are_searched_in_parts_within_the_plans_allowed(monkeypatch):
    monkeypatch.setattr(liquid_batch, "MOST_CONTAINERS", 8)
    monkeypatch.setattr(liquid_batch, "MOST_NODES", 6)
    seen = []

    def counted(batch, seeds, rng, search):
        found = evolve(batch, seeds, rng, search)
        seen.append((len(batch.total), int(batch.starts[-1]), found[2]))
        return found

    evolve = liquid_batch.evolve
    monkeypatch.setattr(liquid_batch, "evolve", counted)
    cluster, nothing, jobs = (
        Cluster.of(20, 4, rack_nodes=5),
        np.zeros(20, int),
        dict.fromkeys(range(1, 17), 3),
    )
    ours = placed(LiquidBatchPlacer(search=Search(max_plans=4000)), cluster, nothing, jobs)
    assert value(cluster, nothing, ours) < value(
        cluster, nothing, placed(LiquidPlacer(), cluster, nothing, jobs)
    )
    assert len(seen) > 1
    assert max(nodes for nodes, _, _ in seen) == 6
    assert max(containers for _, containers, _ in seen) <= 8
    assert sum((30 + containers // 2) * (1 + generations) for _, containers, generations in seen) <= 4000


def test_options_reach_the_search():
    placer = make_placer("liquid-batch:lam=0.3:max_plans=50:seed=9", Setting(NODES, elastic=False))
    assert isinstance(placer, LiquidBatchPlacer)
    assert (placer.search.lam, placer.lam, placer.search.max_plans, placer.seed) == (0.3, 0.3, 50, 9)
    assert placer.all_or_nothing
