"""The decisions that a server makes before it listens, so that its kernels are compiled."""

from __future__ import annotations

import pytest

from shoal.core.cluster import Cluster, Node, User
from shoal.policies.registry import BUILT_IN, make_policy
from shoal.scheduler.scheduler import Scheduler
from shoal.server.loop.policy_change import first_decisions

ONE_GPU = (Node("a", 1, "v100"),)
TWO_TYPES = (Node("a", 4, "v100"), Node("b", 2, "k80"))


@pytest.mark.parametrize("policy", sorted(BUILT_IN))
@pytest.mark.parametrize("nodes", [ONE_GPU, TWO_TYPES], ids=["one GPU", "two types"])
def test_every_policy_decides_on_jobs_that_share_and_wait(policy: str, nodes: tuple[Node, ...]) -> None:
    scheduler = Scheduler(Cluster(nodes, (User("ada"), User("bob"))), make_policy(policy, {}))
    first_decisions(scheduler)
    assert set(scheduler.jobs) == {1, 2, 3}
