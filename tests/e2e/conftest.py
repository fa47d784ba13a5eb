"""Fixtures of the end-to-end tests."""

import pytest
from live_cluster import Cluster


@pytest.fixture
def cluster(tmp_path):
    """A home of its own, with nothing running in it yet."""
    made = Cluster(tmp_path / "home")
    yield made
    made.close()


@pytest.fixture(scope="session")
def one_cluster(tmp_path_factory):
    made = Cluster(tmp_path_factory.mktemp("e2e") / "home")
    made.up(gpus=4)
    yield made
    made.close()


@pytest.fixture
def shared(one_cluster):
    """4 GPUs and max-min, up for all tests that leave it as it was; jobs of one test are gone before the next."""
    if one_cluster.shoal("status").returncode:
        one_cluster.up(gpus=4)
    one_cluster.shoal("policy", "set", "max-min", code=0)
    yield one_cluster
    names = one_cluster.shoal("ps", "-o", "name").stdout.split()
    if names:
        one_cluster.shoal("cancel", *names, "-y", "--grace", "0s")
        for name in names:
            one_cluster.shoal("wait", name, "--timeout", "30s", timeout=60)
