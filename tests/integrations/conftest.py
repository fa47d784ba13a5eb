"""Fixtures of the tests of other tools on Shoal."""

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "e2e"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "torch"))
from live_cluster import Cluster

from shoal.executors.zygote import Zygote


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """A real server with 4 virtual GPUs, which the client of this process finds."""
    made = Cluster(tmp_path_factory.mktemp("integrations") / "home")
    made.up(gpus=4)
    before = os.environ.get("SHOAL_HOME")
    os.environ["SHOAL_HOME"] = str(made.home)
    yield made
    if before is None:
        del os.environ["SHOAL_HOME"]
    else:
        os.environ["SHOAL_HOME"] = before
    made.close()


@pytest.fixture(scope="session")
def zygote():
    """A process that has imported torch: workers begin as copies of it."""
    pytest.importorskip("torch")
    warm = Zygote()
    assert warm.wait_ready(timeout_s=240)
    yield warm
    warm.close()
