"""The default placement: what is there stays, what comes is packed, and no node is ever overcommitted."""

from __future__ import annotations

import itertools
from functools import partial

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from shoal.core.cluster import Cluster, Node
from shoal.placement.best_fit import BestFit
from shoal.placement.fragmentation import fewest_nodes
from shoal.placement.keep_and_pack import KeepAndPack
from shoal.placement.liquid_batch import LiquidBatchPlacer
from shoal.placement.liquid_placer import LiquidPlacer
from shoal.placement.optimus_placer import OptimusPlacer

from .cases import Bench, size


def bench(nodes: int = 4, gpus: int = 4, rack_nodes: int = 0, **options) -> Bench:
    return Bench(Cluster.of(nodes, gpus, rack_nodes=rack_nodes), KeepAndPack(**options))


def with_jobs(b: Bench, *shares: int) -> Bench:
    for job_id, share in enumerate(shares):
        b.add(job_id)
        b.place({job_id: share})
    return b


def test_a_job_takes_the_node_with_least_to_spare_that_holds_it():
    b = with_jobs(bench(), 3, 2)  # node0 has 1 free, node1 has 2 free
    b.add(2)
    assert b.place({2: 2}).placements == {2: ((1, 2),)}
    b.add(3)
    assert b.place({3: 1}).placements == {3: ((0, 1),)}


def test_of_jobs_that_start_together_the_larger_chooses_first():
    b = bench(nodes=2)
    for job_id in range(3):
        b.add(job_id)
    b.place({0: 1, 1: 3, 2: 4})
    assert b.current == {2: ((0, 4),), 1: ((1, 3),), 0: ((1, 1),)}


def test_a_job_that_spans_nodes_takes_as_few_as_possible_and_the_rest_where_it_fits_best():
    b = with_jobs(bench(), 3, 2)  # free: 1, 2, 4, 4
    b.add(2)
    b.place({2: 9})
    assert b.current[2] == ((0, 1), (2, 4), (3, 4))


def test_a_job_that_spans_nodes_stays_in_one_rack_where_that_costs_no_extra_node():
    b = with_jobs(bench(nodes=4, rack_nodes=2), 2)  # node0 half full; rack 0: 2+4, rack 1: 4+4
    b.add(1)
    assert b.place({1: 6}).placements == {1: ((0, 2), (1, 4))}
    b.add(2)
    assert b.place({2: 8}).placements == {2: ((2, 4), (3, 4))}


def test_a_job_that_shrinks_leaves_the_node_where_it_has_least():
    b = with_jobs(bench(), 6)
    assert b.current[0] == ((0, 4), (1, 2))
    assert b.place({0: 4}).placements == {0: ((0, 4),)}
    assert b.place({0: 3}).placements == {0: ((0, 3),)}


def test_a_job_that_grows_fills_its_own_nodes_where_it_has_most_before_any_other():
    b = bench(nodes=3)
    b.add(0)
    b.add(1)
    b.place({0: 4, 1: 3}, given={0: ((0, 1), (1, 3)), 1: ((2, 3),)})
    assert b.place({0: 5}).placements == {0: ((0, 1), (1, 4))}  # node 2 would have been an exact fit
    assert b.place({0: 8}).placements == {0: ((0, 4), (1, 4))}
    assert b.place({0: 9}).placements == {0: ((0, 4), (1, 4), (2, 1))}


def test_growth_beyond_its_own_nodes_prefers_its_own_rack():
    b = bench(nodes=4, rack_nodes=2)
    for job_id in range(4):
        b.add(job_id)
    b.place({0: 4}, given={0: ((2, 4),)})
    b.place({1: 2}, given={1: ((0, 2),)})
    # Node 0 (other rack) has 2 free, an exact fit; node 3 (own rack) is empty.
    assert b.place({0: 6}).placements == {0: ((2, 4), (3, 2))}


def test_jobs_that_keep_their_share_are_not_named_and_not_moved():
    b = with_jobs(bench(), 3, 2, 1)
    before = dict(b.current)
    b.remove(0)
    b.add(7)
    placed = b.place({7: 4})
    assert set(placed.placements) == {7}
    assert all(b.current[j] == before[j] for j in (1, 2))


def test_a_pause_gives_everything_back():
    b = with_jobs(bench(nodes=1), 4)
    b.add(1)
    placed = b.place({0: 0, 1: 4})
    assert placed.placements == {0: (), 1: ((0, 4),)}


def test_shares_stay_on_the_type_the_decision_names_and_move_when_it_changes():
    cluster = Cluster((Node("a", 4, "v100"), Node("b", 4, "k80"), Node("c", 4, "v100")))
    b = Bench(cluster, KeepAndPack())
    b.add(0)
    b.place({0: 6}, types={0: 0})
    assert b.current[0] == ((0, 4), (2, 2))
    b.place({0: 3}, types={0: 1})
    assert b.current[0] == ((1, 3),)


def test_without_a_named_type_a_share_is_still_of_one_type():
    cluster = Cluster((Node("a", 2, "v100"), Node("b", 4, "k80")))
    b = Bench(cluster, KeepAndPack())
    b.add(0)
    placed = b.place({0: 5})
    assert b.current[0] == ((1, 4),)
    assert placed.cut == {0: 4}


def test_more_than_there_is_gets_cut_to_what_there_is():
    b = with_jobs(bench(nodes=1), 3)
    b.add(1)
    assert b.place({1: 2}).cut == {1: 1}
    assert b.current[1] == ((0, 1),)


def test_a_cut_below_the_minimum_is_a_cut_to_nothing():
    b = with_jobs(bench(nodes=1), 3)
    b.add(1, min_gpus=2)
    placed = b.place({1: 2})
    assert placed.cut == {1: 0}
    assert 1 not in b.current
    b.add(2)
    assert b.place({2: 1}).placements == {2: ((0, 1),)}, "what the cut job left is free for others"


def test_all_or_nothing_does_not_cut_to_a_part():
    b = with_jobs(bench(nodes=1, all_or_nothing=True), 3)
    b.add(1)
    assert b.place({1: 2}).cut == {1: 0}


def test_a_place_given_by_the_policy_is_taken_and_others_make_room():
    b = with_jobs(bench(nodes=2), 3)
    b.add(1)
    placed = b.place({1: 4}, given={1: ((0, 4),)})
    assert placed.placements == {1: ((0, 4),), 0: ((1, 3),)}


def test_places_given_twice_are_cut_not_overcommitted():
    b = bench(nodes=1)
    b.add(0)
    b.add(1)
    placed = b.place({0: 3, 1: 3}, given={0: ((0, 3),), 1: ((0, 3),)})
    assert b.used().tolist() == [4]
    assert placed.cut == {1: 1}


def test_jobs_on_a_lost_node_are_placed_elsewhere_and_the_others_stay():
    b = with_jobs(bench(nodes=3), 4, 2)
    b.lose(0)
    placed = b.place({})
    assert placed.placements == {0: ((2, 4),)}
    assert b.current[1] == ((1, 2),)


def test_a_job_that_spans_a_lost_node_keeps_its_other_gpus():
    b = with_jobs(bench(nodes=3), 8)
    b.lose(0)
    b.place({})
    assert b.current[0] == ((1, 4), (2, 4))


def test_nodes_that_come_back_are_used_again():
    b = with_jobs(bench(nodes=1), 2)
    b.lose(0)
    assert b.place({}).cut == {0: 0}
    b.lose()
    assert b.place({0: 2}).placements == {0: ((0, 2),)}


@pytest.mark.parametrize(
    ("share", "expected", "cut"),
    [
        (3, ((0, 3),), {}),
        (4, ((0, 4),), {}),
        (8, ((0, 4), (1, 4)), {}),
        (6, ((0, 4),), {0: 4}),  # neither within a node nor whole nodes: 4 is the most that is
        (11, ((0, 4), (1, 4)), {0: 8}),
    ],
)
def test_with_whole_nodes_a_share_is_within_a_node_or_whole_nodes(share, expected, cut):
    b = bench(nodes=3, whole_nodes=True)
    b.add(0)
    assert b.place({0: share}).cut == cut
    assert b.current[0] == expected


def test_with_whole_nodes_a_job_moves_to_a_node_that_holds_it_or_stays_and_is_cut():
    b = with_jobs(bench(nodes=2, whole_nodes=True), 3, 1)  # both on node 0
    assert b.current == {0: ((0, 3),), 1: ((0, 1),)}
    assert b.place({1: 3}).placements == {1: ((1, 3),)}
    placed = b.place({0: 4})
    assert placed.placements == {0: ((0, 4),)}
    assert b.place({1: 4}).placements == {1: ((1, 4),)}
    b.place({1: 2})
    b.add(2)
    b.place({2: 2})
    placed = b.place({1: 3})
    assert (placed.placements, placed.cut) == ({}, {1: 2})


def follows_rule(placement, gpus: int) -> bool:
    return len(placement) <= 1 or all(g == gpus for _, g in placement)


STEPS = st.lists(
    st.tuples(st.integers(0, 11), st.integers(0, 14), st.integers(0, 9)), min_size=1, max_size=25
)


@given(steps=STEPS, nodes=st.integers(2, 5), gpus=st.sampled_from([1, 2, 4]), rule=st.booleans())
@settings(max_examples=150, deadline=None)
def test_no_sequence_of_decisions_overcommits_cuts_needlessly_or_moves_a_job_that_could_stay(
    steps, nodes, gpus, rule
):
    b = Bench(Cluster.of(nodes, gpus, rack_nodes=2), KeepAndPack(whole_nodes=rule))
    for job_id, share, event in steps:
        if job_id in b.view and event == 0:
            b.remove(job_id)
        elif len(b.view) == 0 or job_id > b.view.job_ids[-1]:
            b.add(job_id, min_gpus=1 + event % 2)
        if job_id not in b.view:
            continue
        total = nodes * gpus - sum(size(p) for j, p in b.current.items() if j != job_id)
        before, decision = dict(b.current), b.decision({job_id: min(share, total)})
        fresh = KeepAndPack(whole_nodes=rule).place(b.view, decision, b.supply, dict(b.current))
        placed = b.place({job_id: min(share, total)})

        assert placed == fresh, "the answer does not depend on what the placer remembers"
        assert (b.used() <= gpus).all()
        assert set(placed.placements) <= {job_id}, "who keeps the share stays"
        got, had = b.current.get(job_id, ()), before.get(job_id, ())
        want = int(decision.gpus[b.view.row(job_id)])
        assert size(got) == placed.cut.get(job_id, want)
        assert size(got) == 0 or size(got) >= min(int(b.view.min_gpus[b.view.row(job_id)]), want)
        if rule:
            assert follows_rule(got, gpus)
        else:
            assert not placed.cut, "without the rule all that is free can be used"
        if not rule and size(got) >= size(had):
            assert all(dict(got).get(n, 0) >= g for n, g in had), "who grows keeps what it has"
        elif not rule:
            assert all(dict(had).get(n, 0) >= g for n, g in got), "who shrinks takes nothing new"


@given(
    free=st.lists(st.integers(0, 4), min_size=1, max_size=6), need=st.integers(1, 12), per=st.integers(1, 3)
)
@settings(max_examples=200, deadline=None)
def test_a_start_spans_the_fewest_nodes_that_any_choice_of_nodes_would(free, need, per):
    b = Bench(Cluster.of(len(free), 4, rack_nodes=per), KeepAndPack())
    b.add(0)
    held = tuple((n, 4 - f) for n, f in enumerate(free) if f < 4)
    if held:
        b.place({0: size(held)}, given={0: held})
    b.add(1)
    placed = b.place({1: min(need, sum(free))})
    if sum(free) == 0:
        return
    need = min(need, sum(free))
    fewest = next(
        k for k in range(1, len(free) + 1) if any(sum(c) >= need for c in itertools.combinations(free, k))
    )
    assert len(placed.placements[1]) == fewest == fewest_nodes(np.array(free), need)


PLACERS = {
    "keep-and-pack": KeepAndPack,
    "node-or-whole-nodes": partial(KeepAndPack, whole_nodes=True),
    "optimus": OptimusPlacer,
    "liquid": LiquidPlacer,
    "liquid-batch": LiquidBatchPlacer,
    "liquid, one worker per node": partial(LiquidPlacer, variant=BestFit.REMOVE_ALWAYS),
    "liquid, authors' code": partial(LiquidPlacer, variant=BestFit.AUTHORS_CODE),
}


@given(seed=st.integers(0, 10**6), rule=st.booleans(), name=st.sampled_from(sorted(PLACERS)))
@settings(max_examples=240, deadline=None)
def test_many_changes_at_once_lost_nodes_types_and_given_places_never_overcommit(seed, rule, name):
    make = partial(PLACERS[name], all_or_nothing=rule)
    rng = np.random.default_rng(seed)
    cluster = Cluster(
        tuple(
            Node(f"n{i}", int(rng.choice([2, 4])), str(rng.choice(["a", "b"])), f"r{i // 2}", f"d{i // 4}")
            for i in range(int(rng.integers(2, 8)))
        )
    )
    b = Bench(cluster, make())
    for job_id in range(12):
        b.add(job_id, min_gpus=int(rng.integers(1, min(3, cluster.total_gpus + 1))))
        if rng.random() < 0.3:
            b.lose(*rng.choice(len(cluster.nodes), int(rng.integers(0, 2)), replace=False).tolist())
        if rng.random() < 0.3:
            b.remove(int(rng.choice(b.view.job_ids)))
        shares, types, given = {}, {}, {}
        left = b.supply.gpus_of_type.copy()
        for job in rng.permutation(b.view.job_ids).tolist():
            kind = int(rng.integers(len(cluster.gpu_types)))
            share = int(rng.integers(0, min(6, left[kind]) + 1))
            left[kind] -= share
            shares[job], types[job] = share, kind
            if rng.random() < 0.15:
                node = int(rng.integers(len(cluster.nodes)))
                up = int(b.supply.gpus_of_node[node])
                if up:
                    given[job] = ((node, int(rng.integers(1, up + 1))),)
                    shares[job], types[job] = given[job][0][1], int(cluster.type_of_node[node])
        decision = b.decision(shares, types, given)
        fresh = make().place(b.view, decision, b.supply, dict(b.current))
        before = dict(b.current)
        placed = b.place(shares, types=types, given=given)

        assert placed == fresh
        assert (b.used() <= b.supply.gpus_of_node).all()
        for job, share in shares.items():
            where = b.current.get(job, ())
            assert size(where) == placed.cut.get(job, share)
            assert {int(cluster.type_of_node[n]) for n, _ in where} <= {types[job]}
            if where == before.get(job, ()):
                assert job not in placed.placements
            if rule and job in placed.cut and job not in given:
                assert where == ()
