"""The stories here drive the command line as the end-to-end tests do, with their helpers."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from engines.absent import skip

sys.path.insert(0, str(Path(__file__).parents[1] / "e2e"))
sys.path.insert(0, str(Path(__file__).parent))
from machines import World


@pytest.fixture(scope="session")
def namespaces():
    """Machines on this one can have processes and directories of their own."""
    if os.geteuid() != 0 or subprocess.run(["unshare", "--pid", "--fork", "true"]).returncode != 0:
        skip("NO TESTS OF PLAIN MACHINES: namespaces need root and unshare")


@pytest.fixture
def world(tmp_path, request, namespaces):
    """A server and no machines yet. The parameter is the lease in seconds."""
    made = World(tmp_path, lease_s=request.param)
    yield made
    made.close()
