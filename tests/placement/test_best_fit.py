"""Liquid's immediate mode: the worked example in its three readings, and the scores step by step."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from shoal.core.cluster import Cluster, Node
from shoal.core.errors import ShoalError
from shoal.placement.best_fit import BestFit, _Tentative, best_fit
from shoal.placement.liquid_score import ContainerPlacement, Containers, code_cost, job_score
from shoal.placement.placer import Unplaced
from shoal.placement.topology import Topology

#: A rack of three nodes with two GPUs each, one of node 1 in use; one server and two workers.
RACK = Cluster.of(3, 2)
USED = np.array([0, 1, 0], np.int32)
JOB = Containers(ps=1, workers=2)


@pytest.mark.parametrize(
    ("variant", "ps", "workers", "network"),
    [
        (BestFit.REMOVE_FULL, (1,), (0, 0), 6),  # p:ww
        (BestFit.REMOVE_ALWAYS, (1,), (0, 2), 6),  # p:w:w
        (BestFit.AUTHORS_CODE, (0,), (0, 1), 3),  # pw:w
    ],
)
def test_the_worked_example_in_its_three_readings(variant, ps, workers, network):
    spot = best_fit(RACK, JOB, USED, variant=variant)
    assert isinstance(spot, ContainerPlacement)
    assert (spot.ps_nodes, spot.worker_nodes) == (ps, workers)
    assert Topology.of(RACK).server_cost(spot.ps_nodes, spot.worker_nodes) == network


def test_the_scores_of_the_worked_example_step_by_step():
    topology, total = Topology.of(RACK), RACK.gpus_of_node

    def score(ps, workers):
        return job_score(topology, total, USED, ps, workers)

    assert score([1], []) == pytest.approx(-0.5)
    assert score([0], []) == pytest.approx(-0.25)
    assert score([1], [0]) == pytest.approx(0.75)
    assert score([1], [0, 0]) == score([1], [0, 2]) == pytest.approx(2.0)
    assert best_fit(RACK, JOB, USED).score == pytest.approx(2.0)
    assert best_fit(RACK, JOB, USED, variant=BestFit.AUTHORS_CODE).score == pytest.approx(1 / 3)


EMPTY_RACK = Cluster.of(3, 4)
TWO_RACKS = Cluster.of(4, 2, rack_nodes=2)


@pytest.mark.parametrize(
    ("cluster", "ps", "workers", "paper", "code"),
    [
        (EMPTY_RACK, [0], [0, 0], -0.375, -1 / 6),  # pww
        (EMPTY_RACK, [0], [0, 1], 1.125, 7 / 6),  # pw:w
        (EMPTY_RACK, [0], [1, 2], 2.625, 2.5),  # p:w:w
        (EMPTY_RACK, [0], [1, 1], 2.625, 13 / 6),  # p:ww
        (TWO_RACKS, [0], [0, 1], 0.25, 2 / 3),
        (TWO_RACKS, [0], [0, 2], 1.25, 11 / 3),
        (TWO_RACKS, [0], [1, 2], 2.25, 5.0),
    ],
)
def test_scores_of_placements_on_empty_clusters(cluster, ps, workers, paper, code):
    topology, total = Topology.of(cluster), cluster.gpus_of_node
    nothing = np.zeros_like(total)
    assert job_score(topology, total, nothing, ps, workers) == pytest.approx(paper)
    assert code_cost(topology, total, nothing, ps, workers) == pytest.approx(code)


@pytest.mark.parametrize(
    ("ps", "workers", "roles"),
    [(1, 2, "pww"), (2, 2, "pwpw"), (0, 3, "www"), (2, 4, "pwwpww"), (3, 1, "pwpp"), (1, 1, "pw")],
)
def test_servers_and_workers_take_turns(ps, workers, roles):
    got = "".join("p" if is_ps else "w" for is_ps in Containers(ps, workers).roles())
    assert got == roles


def test_an_all_reduce_job_goes_where_its_ring_is_short():
    used = np.array([1, 1, 0, 0], np.int32)
    assert best_fit(TWO_RACKS, Containers(0, 2), used).worker_nodes == (0, 1)  # a ring inside the rack
    used = np.array([1, 2, 0, 0], np.int32)
    assert best_fit(TWO_RACKS, Containers(0, 2), used, lam=0.9).worker_nodes == (0, 2)


def test_a_job_that_fits_nowhere_is_told_why():
    full = best_fit(RACK, Containers(1, 6), USED)
    assert full == Unplaced("it needs 7 GPUs and 5 are free")
    literal = best_fit(RACK, Containers(1, 3), USED, variant=BestFit.REMOVE_ALWAYS)
    assert literal == Unplaced("one container per node needs 4 nodes with a free GPU, and there are 3")
    with pytest.raises(ShoalError, match="the workers of a job must be a whole number from 1"):
        Containers(1, 0)


@given(
    data=st.data(),
    gpus=st.lists(st.integers(1, 4), min_size=1, max_size=6),
    ps=st.integers(0, 3),
    workers=st.integers(1, 4),
    variant=st.sampled_from(list(BestFit)),
)
@settings(max_examples=150, deadline=None)
def test_every_step_is_the_first_cheapest_of_all_nodes_with_room(data, gpus, ps, workers, variant):
    """Against a reference that scores every tentative placement from scratch."""
    from shoal.core.cluster import Node

    cluster = Cluster(tuple(Node(f"n{i}", g, rack=f"r{i // 2}") for i, g in enumerate(gpus)))
    used = np.array([data.draw(st.integers(0, g)) for g in gpus], np.int32)
    job = Containers(ps, workers)
    spot = best_fit(cluster, job, used, variant=variant)
    expected = reference(cluster, job, used, variant)
    if expected is None:
        assert isinstance(spot, Unplaced)
    else:
        assert isinstance(spot, ContainerPlacement)
        assert spot.score == pytest.approx(expected[2])
        assert (spot.ps_nodes, spot.worker_nodes) == expected[:2]


def reference(cluster, job, used, variant):
    topology, total = Topology.of(cluster), cluster.gpus_of_node
    placed: list[tuple[int, bool]] = []
    removed: set[int] = set()
    score = 0.0
    for is_ps in job.roles():
        best = None
        for node in range(len(total)):
            mine = sum(n == node for n, _ in placed)
            if node in removed or used[node] + mine >= total[node]:
                continue
            tentative = [*placed, (node, is_ps)]
            if variant is BestFit.AUTHORS_CODE:
                s = replay_code(topology, total, used, tentative)
            else:
                p = [n for n, role in tentative if role]
                w = [n for n, role in tentative if not role]
                # Before its last server is placed the job is still one with servers.
                s = job_score(topology, total, used, p, w) if job.ps == 0 or (p and w) else None
                if s is None:
                    nodes = np.bincount(p + w, minlength=len(total))
                    s = -0.5 * float(sum((nodes[n] + used[n]) / total[n] for n in set(p + w)))
            if best is None or s < best[0] - 1e-9:
                best = (s, node)
        if best is None:
            return None
        score = best[0]
        placed.append((best[1], is_ps))
        if variant is BestFit.REMOVE_ALWAYS:
            removed.add(best[1])
    return tuple(n for n, r in placed if r), tuple(n for n, r in placed if not r), score


def replay_code(topology, total, used, placed):
    network = load = 0.0
    allocated = used.astype(int).copy()
    for i, (node, is_ps) in enumerate(placed):
        for other, role in placed[:i]:
            if role != is_ps and other != node:
                same_rack = topology.rack_of_node[other] == topology.rack_of_node[node]
                network += 1 if same_rack else 4
        load += (1 + allocated[node] + 1) / total[node]
        allocated[node] += 1
    spread = 1 if placed[-1][1] else -1
    return network + (spread * load + len({n for n, _ in placed})) / len(placed)


@pytest.mark.parametrize("seed", range(30))
def test_the_ring_through_one_node_more_costs_what_the_whole_ring_costs(seed):
    rng = np.random.default_rng(seed)
    nodes = int(rng.integers(1, 14))
    cluster = Cluster(
        tuple(Node(f"n{i}", 4, "gpu", f"r{rng.integers(4)}", f"d{rng.integers(3)}") for i in range(nodes))
    )
    topology = Topology.of(cluster)
    at = _Tentative(topology, cluster.gpus_of_node, np.zeros(nodes, np.int32), Containers(0, 6), 0.5)
    for _ in range(6):
        whole = [topology.ring_cost([*at.workers, node]) for node in range(nodes)]
        assert at.cost_of(is_ps=False).tolist() == whole
        at.put(int(rng.integers(nodes)), is_ps=False)
