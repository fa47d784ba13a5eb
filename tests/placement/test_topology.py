"""Liquid's cost of a link, and of whole jobs, on small clusters counted by hand."""

from __future__ import annotations

import itertools

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from shoal.core.cluster import Cluster, Node
from shoal.placement.topology import CROSS_DOMAIN, Topology

#: rack a: nodes 0 1 2, rack b: node 3 (one domain of four); rack a of another domain: node 4
CLUSTER = Cluster(
    tuple(
        Node(f"n{i}", 2, rack=rack, domain=domain)
        for i, (rack, domain) in enumerate([("a", "x"), ("a", "x"), ("a", "x"), ("b", "x"), ("a", "y")])
    )
)
TOPOLOGY = Topology.of(CLUSTER)


@pytest.mark.parametrize(
    ("a", "b", "cost"), [(1, 1, 0), (0, 2, 3), (0, 3, 4), (3, 1, 4), (0, 4, CROSS_DOMAIN * 5)]
)
def test_a_link_costs_the_nodes_of_the_rack_of_the_domain_or_is_dear(a, b, cost):
    assert TOPOLOGY.cost(a, b) == cost
    assert TOPOLOGY.matrix()[a, b] == cost


def test_the_matrix_and_the_sums_agree_with_the_pairs():
    pairs = np.array([[TOPOLOGY.cost(a, b) for b in range(5)] for a in range(5)])
    assert (TOPOLOGY.matrix() == pairs).all()
    others = np.array([0, 0, 3, 4])
    assert (TOPOLOGY.cost_to(others) == pairs[:, others].sum(axis=1)).all()


@pytest.mark.parametrize(
    ("ps", "workers", "cost"),
    [([0], [0, 0], 0), ([0], [0, 1], 3), ([0], [1, 2], 6), ([0, 3], [0, 3], 8), ([], [0, 1], 0)],
)
def test_a_parameter_server_job_pays_for_each_pair(ps, workers, cost):
    assert TOPOLOGY.server_cost(ps, workers) == cost


@pytest.mark.parametrize(
    ("workers", "cost"), [([0, 0], 0), ([0, 1], 6), ([0, 1, 2], 9), ([0, 1, 3], 3 + 4 + 4), ([0, 4], 100)]
)
def test_an_all_reduce_job_pays_for_the_links_of_its_ring(workers, cost):
    assert TOPOLOGY.ring_cost(workers) == cost


@given(
    nodes=st.lists(st.tuples(st.integers(0, 1), st.integers(0, 1)), min_size=2, max_size=6),
    data=st.data(),
)
@settings(max_examples=60, deadline=None)
def test_no_other_order_of_the_nodes_makes_a_cheaper_ring(nodes, data):
    cluster = Cluster(tuple(Node(f"n{i}", 1, rack=f"r{r}", domain=f"d{d}") for i, (d, r) in enumerate(nodes)))
    topology = Topology.of(cluster)
    used = data.draw(st.sets(st.integers(0, len(nodes) - 1), min_size=2))
    cheapest = min(
        sum(topology.cost(a, b) for a, b in zip(order, [*order[1:], order[0]]))
        for order in itertools.permutations(used)
    )
    assert topology.ring_cost(used) == pytest.approx(cheapest)
