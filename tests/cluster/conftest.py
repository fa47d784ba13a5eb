"""The stories here drive the command line as the end-to-end tests do, with their helpers."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "e2e"))
sys.path.insert(0, str(Path(__file__).parent))
from machines import World


@pytest.fixture
def world(tmp_path, request):
    """A server and no machines yet. The parameter is the lease in seconds."""
    made = World(tmp_path, lease_s=request.param)
    yield made
    made.close()
