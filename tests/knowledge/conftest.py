from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def shared_data() -> Path:
    path = Path(__file__).resolve().parents[3] / "shared" / "data"
    if not path.is_dir():
        pytest.skip("the public measurements are not beside the repository (shared/data)")
    return path
