"""Users receive what some schedule can give them, where gangs keep each other from their shares."""

import numpy as np
import pytest
from claims import CLAIMS, MOST_TURNS, gandiva_fair
from drive import Drive
from possible import fraction_for_all

from shoal.core.cluster import Cluster, User
from shoal.policies.registry import make_policy

QUANTUM_S = 60.0


def test_where_gangs_fill_the_nodes_all_can_have_their_parts():
    assert fraction_for_all([(0, 4), (1, 2), (1, 2)], 1, 4, [2.0, 2.0]) == pytest.approx(1.0)


def test_a_user_due_all_of_the_time_and_a_gang_as_large_as_the_cluster_cannot_both_have_their_parts():
    # f 2 of 8 go to the gang for f / 4 of the time, the 6 small ones run in the rest: f / 4 + f = 1.
    assert fraction_for_all([(0, 8)] + [(1, 1)] * 6, 2, 4, [2.0, 6.0]) == pytest.approx(0.8)


#: Either both gangs of 8 run, or one of them beside all the small jobs: u2's need not run as often as they do.
CROWDED = {"u0": (3.0, (8, 2)), "u1": (3.0, (8, 8)), "u2": (3.0, (2,)), "u3": (1.0, (2, 2))}


def jobs_of(claims):
    """(user, size) of all."""
    return [(k, size) for k, (_, sizes) in enumerate(claims.values()) for size in sizes]


def driven(claims, nodes, gpus):
    """Users with tickets and gangs of these sizes on nodes of so many GPUs, under gandiva-fair."""
    users = [User(name, tickets) for name, (tickets, _) in claims.items()]
    d = Drive(Cluster.of(nodes, gpus).with_users(users), make_policy("gandiva-fair"))
    for name, (_, sizes) in claims.items():
        for size in sizes:
            d.submit(name, size)
    return d


def test_who_cannot_have_its_part_gets_the_fraction_that_all_can_have():
    jobs = jobs_of(CROWDED)
    part = np.array([6.0, 6.0, 2.0, 2.0])
    # With two gangs of 8 for g of the time: u2 has 2 (1 - g), u0 and u1 have 10 + 6 g of their 12. So g = 1/9.
    assert fraction_for_all(jobs, 2, 8, part) == pytest.approx(8 / 9)
    d = driven(CROWDED, 2, 8)
    np.testing.assert_allclose(d.policy.entitled().sum(axis=1), part)
    d.run(12 * 3600)
    had = d.ledger.account.sum(axis=1)[:, 1] / d.now_s
    assert had.sum() >= 0.99 * 16.0
    assert (had >= 0.98 * 8 / 9 * part).all(), had / part


def test_users_end_12_hours_within_a_quantums_work_of_their_shares_in_95_percent_of_feasible_claims():
    found = [gandiva_fair(seed, kind, hours=12.0) for kind in list(CLAIMS)[:4] for seed in range(10)]
    feasible = [f for f in found if f.end_off <= 1.0 or f.feasible]
    assert len(feasible) >= 36
    assert sum(f.end_off <= 1.0 for f in feasible) >= 0.95 * len(feasible), found
    assert max(f.turns for f in found) <= MOST_TURNS, "no job starves"
    assert sum(f.used for f in found) >= 0.95 * len(found), "GPUs are in use"
