"""Fixtures of the end-to-end tests."""

import pytest
from live_cluster import Cluster


@pytest.fixture
def cluster(tmp_path):
    """A home of its own, with nothing running in it yet."""
    made = Cluster(tmp_path / "home")
    yield made
    made.close()
