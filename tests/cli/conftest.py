"""A server for all tests of the command line, on a free port in a temporary home."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "e2e"))
from live_cluster import Cluster


@pytest.fixture(scope="session")
def live(tmp_path_factory):
    """4 virtual GPUs, max-min; tests name their jobs so that they do not meet."""
    made = Cluster(tmp_path_factory.mktemp("cli") / "home")
    made.up()
    yield made
    made.close()


@pytest.fixture
def nowhere(tmp_path):
    """A home without a server."""
    made = Cluster(tmp_path / "home")
    yield made
    made.close()
